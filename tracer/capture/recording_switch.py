"""Switches the recording of this rank on and off at the ends of steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.capture.step_marks import StepMarks
from ddltrace.tracer.config import LEVELS
from ddltrace.tracer.interpose.operators import open_window

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_NEVER: Final = sys.maxsize
_OPERATOR_STEPS: Final = 3
"""Steps in which operators are recorded, if recording is not switched off before."""


@dataclass(frozen=True)
class Change:
    """What begins with a step.

    Attributes:
        step: The step.
        level: The level of detail from then on; None to record nothing.
        reason: Why, if a trigger began it.
        called: What the step, and so all later ones, are called from then on; None if as before.
    """

    step: int
    level: str | None
    reason: str = ""
    called: int | None = None

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step {self.step!r:.40}")
        if self.level is not None and self.level not in LEVELS:
            raise ValueError(f"level {self.level!r:.40}")
        if not isinstance(self.reason, str):
            raise ValueError("reason")
        if self.called is not None and (type(self.called) is not int or self.called < self.step):
            raise ValueError(f"called {self.called!r:.40}")


class RecordingSwitch:
    """Changes what a rank records, on the thread that trains, between two steps.

    Attributes:
        level: The current level of detail; None while nothing is recorded.
        marks: What identifies this rank's steps for the others; None once all ranks call them the
            same.
        planned: The step for which the last order was planned; -1 before any.

    Args:
        context: The parts of the recording rank.
        begin_off: Whether the rank records nothing at first.
        wake_writer: Asks for a write without waiting for it.
    """

    def __init__(
        self, context: PatchContext, *, begin_off: bool, wake_writer: Callable[[], None]
    ) -> None:
        self._context = context
        self._wake_writer = wake_writer
        self._changes: list[Change] = []
        self._steps = context.steps
        self._changing = threading.Lock()
        self._on_step: Callable[[int, int], None] | None = None
        self.level: str | None = None if begin_off else context.config.level
        self.marks: StepMarks | None = None
        self.planned = -1
        if context.config.attached:
            self.marks = StepMarks()
            self._steps.watched = True
        # First of all: what is called at the end of a step must not see a step of which nothing is
        # recorded.
        self._steps.on_update.insert(0, self.after_step)
        self._steps.on_unrecorded = self.after_step
        if begin_off:
            context.patches.are_in = False
            context.recorder.switch(False, time.monotonic_ns())
            context.recorder.rests_from_ns = 0
            context.record.info.windows = [{"first": 0, "stop": 0, "level": context.config.level}]
        elif self.level == "op":
            open_window(context, *context.config.op_steps)

    @property
    def following(self) -> int:
        """The first step with which a change can still begin."""
        return self._steps.following

    @property
    def step_ns(self) -> int | None:
        """Duration of the last step; None before its end."""
        return self._steps.last_ns or None

    def watch(self, on_step: Callable[[int, int], None]) -> None:
        """Calls a function after each step that is not recorded, with its number and duration."""
        self._on_step = on_step
        self._steps.watched = True

    def plan(self, changes: Sequence[Change]) -> bool:
        """Plans changes, in place of those that are planned for the same or later steps.

        Args:
            changes: By increasing steps.

        Returns:
            Whether the first of them is in time; otherwise it begins as soon as possible.
        """
        step, renames = changes[0].step, changes[0].called is not None
        with self._changing:
            if renames and self.marks is None:
                return False  # another order has renamed the steps meanwhile
            former = self._changes
            self._plan([c for c in former if c.step < step] + list(changes))
            in_time = self.following <= step
            if renames and not in_time:
                self._plan(former)  # another step than on the other ranks would get the name
            else:
                self.planned = step
        return in_time

    def plan_level(self, step: int, level: str) -> bool:
        """Plans another level for all steps from one on that are or will be recorded.

        Returns:
            As of `plan`.
        """
        with self._changing:
            earlier = [c for c in self._changes if c.step <= step]
            later = [c for c in self._changes if c.step > step]
            if (earlier[-1].level if earlier else self.level) is not None:
                earlier.append(Change(step, level))
            changed = [replace(c, level=None if c.level is None else level) for c in later]
            self._plan(earlier + changed)
            self.planned = step
        return self.following <= step

    def _plan(self, changes: list[Change]) -> None:
        self._changes = changes
        self._steps.due = changes[0].step if changes else _NEVER

    def after_step(self, number: int) -> None:
        """Makes the changes that are due.

        Args:
            number: Index of the step that ended.
        """
        if self.marks is not None:
            self.marks.note(number)
        if self._on_step is not None and self.level is None and self._steps.last_ns:
            self._on_step(number, self._steps.last_ns)
        if number + 1 < self._steps.due:
            return
        with self._changing:
            due = [change for change in self._changes if change.step <= number + 1]
            self._plan(self._changes[len(due) :])
            for change in due:
                if change.called is not None:
                    number += change.called - change.step
                    self._rename(number + 1, change.called - change.step)
        if not due:
            return  # another order came at the same time
        try:
            # The end of the former step is the start of this one.
            self._make(due[-1], number + 1, self._steps.updated_ns or time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - the job continues
            self._context.fault("switch", error)

    def _rename(self, following: int, shift: int) -> None:
        """Calls steps as all ranks do, which are all about to begin the same one.

        Messages are numbered from here on, too.

        Args:
            following: What the next step is called from now on.
            shift: By how much this differs from what it was called.
        """
        self.marks = None
        self.planned += shift
        self._steps.watched = self._on_step is not None
        self._steps.call_following(following)
        self._plan([replace(c, step=c.step + shift, called=None) for c in self._changes])
        native = self._context.native
        if native is not None:
            for group in range(len(native.collectives)):
                native.collectives[group] = 0

    def _make(self, change: Change, step: int, now: int) -> None:
        if change.level == self.level:
            return
        recorder = self._context.recorder
        was_on, self.level = self.level is not None, change.level
        if was_on:
            self._context.record.end_window(step)
        if change.level is None:
            self._steps.record_last()
            recorder.switch(False, now)
            self._context.patches.take_out()
            self._call_all(False)
            self._wake_writer()
            return
        gradients = self._context.registry.native
        if gradients is not None:
            gradients.collect()  # those of the former step, at its level
        recorder.detailed = change.level != "comm"
        self._context.record.begin_window(step, change.level, change.reason)
        if not was_on:
            recorder.switch(True, now)
            recorder.set_step(step, now)
            self._call_all(True)
            self._context.patches.put_in()
        if change.level == "op":
            window = open_window(self._context, step, min(step + _OPERATOR_STEPS, self._steps.due))
            window.after_step(step - 1)
        self._wake_writer()

    def _call_all(self, on: bool) -> None:
        for call in self._context.on_switch[:]:
            try:
                call(on)
            except Exception as error:  # noqa: BLE001 - the others still have to change
                self._context.fault("switch", error)
