"""Reads start and end of messages that Gloo's threads record, without a waiting thread.

A Python thread that waits for a message wakes up about five times until it is complete, and each
time takes a core and the interpreter lock from the job. `native/gloo_messages.cpp` records both
times in Gloo's threads and wakes no thread. It also records when a message left Gloo's queue.
Without the native library (no compiler, or another PyTorch version), the reapers of `reaper.py`
observe the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.tracer.native.layout import MESSAGE, SLOT
from ddltrace.tracer.record.recorder import Message, Recorder
from ddltrace.tracer.trace.schema import CLOCKS, STATUSES

if TYPE_CHECKING:
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.trace.arrow_arrays import Booleans, Integers

_FIELDS: Final = len(SLOT)
_BEGAN: Final = SLOT["began_ns"]
_ENDED: Final = SLOT["ended_ns"]
_STATE: Final = SLOT["state"]
_WAITED: Final = SLOT["waited"]
# Values of the field `_STATE`; see `State` in `gloo_messages.cpp`.
_OPEN: Final = 0
_OK: Final = 1
_FAILED: Final = 2
_GONE: Final = 3
_CLOCK: Final = {name: CLOCKS.index(name) for name in ("gloo", "wait", "polling")}
_LEFT_OPEN: Final = STATUSES.index("open")
_STATUS_OF_STATE: Final = np.array([STATUSES.index(x) for x in ("open", "ok", "failed", "ok")])


class GlooTimes:
    """Follows Gloo messages to their end.

    Args:
        library: The native library that records the times.
        recorder: The recorder whose messages are completed.

    Attributes:
        listens: Whether launches are followed; false before the first Gloo message of a job.
        end_launch: Ends a launch that `begin_launch` began. It is implemented in C++ only: it runs
            while an exception of the launch propagates, and must not raise one itself.
    """

    def __init__(self, library: NativeLibrary, recorder: Recorder) -> None:
        self._begin_launch = library.begin_launch
        self.end_launch: Callable[[], None] = library.end_launch
        self._slots = library.slots
        self._slot_table = np.frombuffer(library.slots, np.int64).reshape(-1, _FIELDS)
        # C++ uses the slots before this one.
        self._first_slot = len(library.ring) // len(MESSAGE)
        self._num_slots = len(library.slots) // _FIELDS - self._first_slot
        self.listens = False
        self._recorder = recorder
        self._numbers = itertools.count()
        self._followed: dict[int, Message] = {}
        self._until_waited: dict[int, Message] = {}

    def begin_launch(self, *, waited_once: bool) -> int:
        """Begins a launch: all launches of this thread until `end_launch` are one message.

        Args:
            waited_once: Whether only a wait of the handle's holder completes the message.

        Returns:
            The slot of the message; -1 if there is none, in which case `end_launch` is not called.
        """
        if not self.listens:
            return -1
        slot = self._first_slot + next(self._numbers) % self._num_slots
        is_free = slot not in self._followed and slot not in self._until_waited
        return slot if is_free and self._begin_launch(slot, waited_once) else -1

    def is_gone(self, slot: int) -> bool:
        """Whether the end of a message will not be reported any more."""
        return bool(self._slots[slot * _FIELDS + _STATE] == _GONE)

    def follow(self, slot: int, message: Message, *, waited_once: bool) -> bool:
        """Follows a message, and completes it when its end is known.

        Args:
            slot: Slot of the launch.
            waited_once: Whether only a wait of the handle's holder completes the message.

        Returns:
            Whether the end will be known.
        """
        if self.is_gone(slot):
            return False
        self.adopt(slot, message, waited_once=waited_once)
        return True

    def adopt(self, slot: int, message: Message, *, waited_once: bool) -> None:
        """Follows a message that cannot be followed in any other way.

        Args:
            slot: Slot of the launch.
            waited_once: See `follow`.
        """
        message.slot = slot
        message.settle = self.settle
        (self._until_waited if waited_once else self._followed)[slot] = message

    def collect(self) -> list[int]:
        """Completes the messages that have ended since the last call.

        Returns:
            Their slots, and those of messages that will not be waited for any more.
        """
        slots = self._slots
        ended = [slot for slot in list(self._followed) if slots[slot * _FIELDS + _STATE] != _OPEN]
        for slot in ended:
            # A message whose end was not reported is complete by now.
            self._recorder.complete(self._followed[slot], time.monotonic_ns(), "polling")
            del self._followed[slot]
        for slot, message in list(self._until_waited.items()):
            is_open = slots[slot * _FIELDS + _STATE] == _OPEN
            if not is_open and not self._has_no_end(slot):
                self._recorder.complete(message, time.monotonic_ns(), "polling")
            if message.end_ns is not None or not is_open:
                del self._until_waited[slot]
                ended.append(slot)
        return ended

    def waited(self, slot: int, end_ns: int, *, failed: bool) -> None:
        """Records that the holder of a message's handle has waited for it.

        Args:
            slot: Slot of the launch.
            end_ns: When the wait ended.
            failed: Whether the wait raised an exception.
        """
        at = slot * _FIELDS
        # Gloo reports the end of a receive inside the wait, but not that it failed, and then lets
        # the message go.
        if self._slots[at + _STATE] in (_OPEN, _GONE):
            if not self._slots[at + _ENDED]:
                self._slots[at + _ENDED] = end_ns
                self._slots[at + _WAITED] = 1
            self._slots[at + _STATE] = _FAILED if failed else _OK

    @property
    def followed(self) -> list[int]:
        """The slots of messages that are being followed."""
        return list(self._followed)

    def abandon(self) -> None:
        """Drops all messages, in a forked child, where no message will end."""
        self._followed.clear()
        self._until_waited.clear()

    def is_over(self, slot: int) -> bool:
        """Whether a message has ended, or its end will not be reported any more."""
        return bool(self._slots[slot * _FIELDS + _STATE] != _OPEN)

    def of_ended(
        self, slots: Integers, enqueue_ns: Integers, waited_once: Booleans
    ) -> tuple[Booleans, Integers, Integers, Integers, Integers]:
        """Returns the times that Gloo's threads recorded for messages that are not followed.

        Args:
            slots: Slots of the launches.
            enqueue_ns: Launch times.
            waited_once: Whether only a wait of the handle's holder completes the message.

        Returns:
            Whether each message has ended, and its start, end, status (index in `STATUSES`) and
            what they were read from (index in `CLOCKS`). An end of -1 means that the end will never
            be reported.
        """
        state = self._slot_table[slots, _STATE]  # read before the times, which are written first
        times = self._slot_table[slots]
        ended = times[:, _ENDED]
        has_end = ended != 0
        is_left_open = waited_once & (state == _GONE) & ~has_end
        # Other messages whose end was not reported are complete by now.
        without_end = np.where(is_left_open, -1, time.monotonic_ns())
        start = np.where(has_end, started(times[:, _BEGAN], enqueue_ns, ended), enqueue_ns)
        status = np.where(is_left_open, _LEFT_OPEN, _STATUS_OF_STATE[state])
        reported = np.where(times[:, _WAITED] != 0, _CLOCK["wait"], _CLOCK["gloo"])
        clock = np.where(has_end, reported, _CLOCK["polling"])
        return state != _OPEN, start, np.where(has_end, ended, without_end), status, clock

    def _has_no_end(self, slot: int) -> bool:
        """Whether the end of a message will not be reported any more and was not recorded."""
        return self.is_gone(slot) and not self._slots[slot * _FIELDS + _ENDED]

    def settle(self, message: Message) -> None:
        """Sets the times of a message to those that Gloo's threads recorded."""
        times = self._stored_times(message.slot, message.enqueue_ns)
        if times is not None:
            message.start_ns, message.end_ns = times
            message.clock = "wait" if self._slots[message.slot * _FIELDS + _WAITED] else "gloo"
        if self._slots[message.slot * _FIELDS + _STATE] == _FAILED:
            message.status = "failed"

    def _stored_times(self, slot: int, enqueue_ns: int) -> tuple[int, int] | None:
        """Returns start and end of a message; None if its end was not reported."""
        at = slot * _FIELDS
        began, ended = self._slots[at + _BEGAN], self._slots[at + _ENDED]
        return (int(started(began, enqueue_ns, ended)), ended) if ended else None


def started(began_ns: Any, enqueue_ns: Any, ended_ns: Any) -> Any:
    """Returns when messages began: Gloo may report the start after the end of the wait."""
    return np.minimum(np.maximum(began_ns, enqueue_ns), ended_ns)
