"""Determines where one optimizer step ends and the next begins.

A step consists of the work for one update: it ends when an optimizer has stepped. Optimizers that
step one after the other, with no forward or backward between them, share a step. The next step
begins where the former ended, so that data loading and logging are part of it; an evaluation
between two steps is part of neither. A run of evaluating forward passes is recorded as a marker.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.trace.schema import EVALUATION


class Steps:
    """Follows the job's steps.

    A step is recorded when the next one's training begins or at the end of the job, because only
    then is it known that no further optimizer belongs to it. Its thread is the training thread,
    which is not the main thread in some frameworks, and may differ from the thread that updates.

    Attributes:
        updated_ns: When an optimizer ended the step; None before.
        on_update: Called after each update with the number of its step.
        on_unrecorded: Called instead while recording is switched off, if `due` follows or all steps
            are `watched`.
        last_ns: Duration of the last step that has ended; 0 before.
        due: The step with which recording changes.
        watched: Whether `on_unrecorded` is called after every step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._site = recorder.site("step", "step")
        self._number = 0
        self._start_ns: int | None = None
        self.updated_ns: int | None = None
        self._thread = 0
        self._trained = False
        self._steppers: set[int] = set()
        self._is_recorded = True
        self._evaluation_ns: int | None = None
        self._evaluated_ns = 0
        self._evaluator = 0
        self.on_update: list[Callable[[int], None]] = []
        self.on_unrecorded: Callable[[int], None] = lambda _: None
        self.last_ns = 0
        self.due = sys.maxsize
        self.watched = False

    @property
    def number(self) -> int:
        """The step of the last update, until the training of the next step begins."""
        return self._number

    def begin_data(self, now_ns: int) -> None:
        """A batch is fetched: the first one begins the first step."""
        if self._start_ns is None:
            self._open(now_ns)

    def begin_training(self, now_ns: int) -> None:
        """A forward or backward pass that trains begins."""
        self._close_updated()
        if self._evaluation_ns is not None:
            self._close_evaluation()
        if self._start_ns is None or self._recorder.step is None:
            self._open(now_ns)
        if not self._trained:
            self._thread = threading.get_ident()
        self._trained = True

    def begin_evaluation(self, now_ns: int) -> None:
        """A forward pass of a model in training begins that trains nothing."""
        self._close_updated()
        if self._evaluation_ns is None:
            self._evaluation_ns, self._evaluator = now_ns, threading.get_ident()
        if not self._trained:
            self._recorder.set_step(None, now_ns)

    def end_evaluation(self, now_ns: int) -> None:
        """Such a forward pass ends; the next step begins here at the earliest."""
        self._evaluated_ns = now_ns
        if not self._trained and self._start_ns is not None:
            self._open(now_ns)

    def end_checkpoint(self) -> None:
        """A checkpoint was saved or loaded: it ends an evaluation of the same thread."""
        if threading.get_ident() == self._evaluator:
            self._close_evaluation()

    def begin_update(self, optimizer: int, now_ns: int) -> None:
        """An optimizer begins its step.

        Args:
            optimizer: Its identity: the same one cannot step twice in one step.
            now_ns: When.
        """
        if optimizer in self._steppers:
            self._close_updated()
        if self._start_ns is None or self._recorder.step is None:
            self._open(now_ns)
        elif self.updated_ns is not None:
            self._recorder.set_step(self._number, now_ns)
        self._steppers.add(optimizer)

    def end_update(self, now_ns: int) -> None:
        """An optimizer has stepped; what follows belongs to the next step."""
        self.updated_ns = now_ns
        if not self._trained:
            self._thread = threading.get_ident()
        self._recorder.set_step(self._number + 1, now_ns)
        self._is_recorded &= not self._recorder.paused
        if self._start_ns is not None:
            self.last_ns = now_ns - self._start_ns
        for call in self.on_update[:]:
            call(self._number)

    def begin_unrecorded(self) -> None:
        """While recording is switched off: a backward pass begins after an update."""
        # As `_close_updated`; the job waits for this in every step.
        self._number += 1
        self._start_ns, self.updated_ns = self.updated_ns, None
        self._trained, self._is_recorded = False, True
        self._steppers.clear()

    def count_update(self, optimizer: int, now_ns: int) -> None:
        """While recording is switched off: an optimizer has stepped; see `begin_update`."""
        if optimizer in self._steppers:
            self._close_updated()
        self._steppers.add(optimizer)
        self._is_recorded = False
        self.updated_ns = now_ns
        if self._start_ns is None:
            self._start_ns = now_ns
        self.last_ns = now_ns - self._start_ns
        if self.watched or self._number + 1 >= self.due:
            self.on_unrecorded(self._number)

    def call_following(self, number: int) -> None:
        """Sets the number of the step after the one that an optimizer has just ended."""
        self._number = number - 1

    @property
    def following(self) -> int:
        """The first step that has certainly not begun."""
        return self._number + (1 if self.updated_ns is None else 2)

    def record_last(self) -> None:
        """Records the step that an optimizer has ended: recording is about to be switched off."""
        self._close_evaluation()
        if self._is_recorded and self.updated_ns is not None and self._start_ns is not None:
            self._recorder.add(self._site, self._start_ns, self.updated_ns, self._thread)
            self._is_recorded = False

    def close(self) -> None:
        """Ends the last step, if it was completed, and the last evaluation."""
        self._close_updated()
        self._close_evaluation()

    def _open(self, now_ns: int) -> None:
        self._start_ns = now_ns
        self._recorder.set_step(self._number, now_ns)

    def _close_evaluation(self) -> None:
        """Records the evaluation, until the end of its last forward pass."""
        start, end = self._evaluation_ns, self._evaluated_ns
        if start is not None and end > start:
            self._evaluation_ns = None
            if not self._recorder.paused:
                site = self._recorder.site("marker", EVALUATION)
                self._recorder.add(site, start, end, self._evaluator)

    def _close_updated(self) -> None:
        """Records the step that an optimizer has ended."""
        if self.updated_ns is None or self._start_ns is None:
            return
        if self._is_recorded:
            self._recorder.add(self._site, self._start_ns, self.updated_ns, self._thread)
        self._number += 1
        self._start_ns = self.updated_ns
        self.updated_ns = None
        self._trained = False
        self._is_recorded = True
        self._steppers.clear()
