"""Observes when asynchronous messages complete.

A callback on the future of a message costs the launching thread tens of microseconds; a thread
that waits for the messages costs it one queue entry. Messages of different groups do not wait for
each other, so each group has its own reapers. It has two, because a Gloo group runs two messages
at a time, and the later of them can complete first.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ddltrace.tracer.record.recorder import Message

# A message can be complete before its launch has returned to the job.
_PATIENCE_S: Final = 0.05

_AT_A_TIME: Final = 2
"""The number of threads that PyTorch creates for a Gloo group."""


@dataclass
class _Followed:
    """A message that is followed.

    Attributes:
        work: Its handle.
        message: The message.
        poll: Whether to ask for its end instead of waiting for it.
    """

    work: Any
    message: Message
    poll: bool


class Reapers:
    """Follows asynchronous messages to their end.

    Args:
        wait: Blocks until a message is complete; the original ``Work.wait``.
        is_completed: Returns without blocking whether it is complete; the original
            ``Work.is_completed``.
        completed: Called when a message is complete, with the time, what it was read from (one of
            `CLOCKS`) and whether it failed.
        release: Called with a message's `Work` when it is complete and its caller has had the
            time to take it.
        on_fault: Called with errors of the reaper.
    """

    def __init__(
        self,
        wait: Callable[[Any], Any],
        is_completed: Callable[[Any], bool],
        completed: Callable[[Message, int, str, bool], None],
        release: Callable[[Any], None],
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._wait = wait
        self._is_completed = is_completed
        self._completed = completed
        self._release = release
        self._on_fault = on_fault
        self._groups: dict[str, _GroupReapers] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def follow(self, work: Any, message: Message, *, poll: bool) -> None:
        """Records the completion of a message.

        Args:
            work: The message's handle.
            poll: Whether to poll for the end, because a wait would have side effects.
        """
        group = self._groups.get(message.group)
        if group is None:
            with self._lock:
                if self._stopped:
                    return
                group = self._groups.get(message.group) or _GroupReapers(
                    self._reap, self._release, self._on_fault
                )
                self._groups[message.group] = group
        group.queue.put(_Followed(work, message, poll))

    def stop(self, timeout_s: float) -> None:
        """Waits until the messages launched so far are complete, at most for the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopped = True
        groups = list(self._groups.values())
        for group in groups:
            for _ in group.threads:
                group.queue.put(None)
        for group in groups:
            for thread in group.threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _reap(self, followed: _Followed) -> None:
        failed = False
        try:
            if followed.poll:
                while not self._is_completed(followed.work):
                    time.sleep(0.0005)
            else:
                self._wait(followed.work)
        except Exception:  # noqa: BLE001 - the job sees the same error at its own wait
            failed = True
        clock = "polling" if followed.poll else "thread"
        self._completed(followed.message, time.monotonic_ns(), clock, failed)


class _GroupReapers:
    """Waits for the messages of one group, in launch order."""

    def __init__(
        self,
        reap: Callable[[_Followed], None],
        release: Callable[[Any], None],
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self._reap = reap
        self._release = release
        self._on_fault = on_fault
        self.queue: queue.SimpleQueue[_Followed | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        for _ in range(_AT_A_TIME):
            thread = threading.Thread(target=self._run, name="ddltrace-reaper", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads: one is enough
                if not self.threads:
                    raise
                break
            self.threads.append(thread)

    def _run(self) -> None:
        """Follows messages until it is stopped."""
        work: Any = None
        while True:
            item, idle = None, False
            try:
                item = self.queue.get(timeout=None if work is None else _PATIENCE_S)
            except queue.Empty:
                idle = True
            # Tracing must not extend the lifetime of the job's objects.
            former, work = work, None
            try:
                if former is not None:
                    self._release(former)
                if item is not None:
                    self._reap(item)
            except Exception as error:  # noqa: BLE001 - the next messages are to be followed
                self._on_fault("reaper", error)
            del former
            if item is not None:
                work = item.work
            elif not idle:
                return
