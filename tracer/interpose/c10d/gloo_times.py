"""Takes start and end of messages from Gloo's threads: a waiting thread would wake up for each.

A Python thread that waits for a message wakes up about five times until it is complete, and each
time takes a core and the interpreter lock from the job. `native/gloo_messages.cpp` notes both times
where they happen and wakes nobody. It also knows when a message left Gloo's queue. Without it (no
compiler, or another PyTorch) the reapers of `reaper.py` learn the end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.tracer.native.layout import MESSAGE, SLOT
from ddltrace.tracer.record.recorder import Message, Recorder
from ddltrace.tracer.trace.schema import STATUSES

if TYPE_CHECKING:
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.trace.arrow_arrays import Booleans, Integers

_FIELDS: Final = len(SLOT)
_BEGAN: Final = SLOT["began_ns"]
_ENDED: Final = SLOT["ended_ns"]
_STATE: Final = SLOT["state"]
# What stands at `_STATE`; see `State` in `gloo_messages.cpp`.
_OPEN: Final = 0
_OK: Final = 1
_FAILED: Final = 2
_GONE: Final = 3
_LEFT_OPEN: Final = STATUSES.index("open")
_STATUS_OF_STATE: Final = np.array([STATUSES.index(x) for x in ("open", "ok", "failed", "ok")])


class GlooTimes:
    """Follows messages of Gloo to their end.

    Args:
        library: What takes down the times.
        recorder: Whose messages to complete.

    Attributes:
        listens: Whether launches are followed; not before a job's first message of Gloo.
        end_launch: Ends what `begin_launch` has begun. C++ alone: it runs in the way of whatever
            the launch raises, and cannot raise itself.
    """

    def __init__(self, library: NativeLibrary, recorder: Recorder) -> None:
        self._begin_launch = library.begin_launch
        self.end_launch: Callable[[], None] = library.end_launch
        self._slots = library.slots
        self._slot_table = np.frombuffer(library.slots, np.int64).reshape(-1, _FIELDS)
        # Those before are taken by C++.
        self._first_slot = len(library.ring) // len(MESSAGE)
        self._num_slots = len(library.slots) // _FIELDS - self._first_slot
        self.listens = False
        self._recorder = recorder
        self._numbers = itertools.count()
        self._followed: dict[int, Message] = {}
        self._until_waited: dict[int, Message] = {}

    def begin_launch(self, *, waited_once: bool) -> int:
        """What this thread launches until `end_launch` is one message.

        Args:
            waited_once: Whether only a wait of whoever holds it completes it.

        Returns:
            The message's slot; -1 if there is none, and then no `end_launch` is due.
        """
        if not self.listens:
            return -1
        slot = self._first_slot + next(self._numbers) % self._num_slots
        is_free = slot not in self._followed and slot not in self._until_waited
        return slot if is_free and self._begin_launch(slot, waited_once) else -1

    def is_gone(self, slot: int) -> bool:
        """Whether nobody will tell the end of a message any more."""
        return bool(self._slots[slot * _FIELDS + _STATE] == _GONE)

    def follow(self, slot: int, message: Message, *, waited_once: bool) -> bool:
        """Completes a message when its end is known.

        Args:
            slot: Of its launch.
            message: The message.
            waited_once: Whether only a wait of whoever holds it completes it.

        Returns:
            Whether its end will be known.
        """
        if self.is_gone(slot):
            return False
        self.adopt(slot, message, waited_once=waited_once)
        return True

    def adopt(self, slot: int, message: Message, *, waited_once: bool) -> None:
        """The same for a message that nobody else can follow.

        Args:
            slot: Of its launch.
            message: The message.
            waited_once: See `follow`.
        """
        message.slot = slot
        message.settle = self.settle
        (self._until_waited if waited_once else self._followed)[slot] = message

    def collect(self) -> list[int]:
        """Completes the messages that have ended since the last call.

        Returns:
            Their slots, and those of messages that nobody will wait for any more.
        """
        slots = self._slots
        ended = [slot for slot in list(self._followed) if slots[slot * _FIELDS + _STATE] != _OPEN]
        for slot in ended:
            # What nobody told the end of is over by now.
            self._recorder.complete(self._followed[slot], time.monotonic_ns())
            del self._followed[slot]
        for slot, message in list(self._until_waited.items()):
            is_open = slots[slot * _FIELDS + _STATE] == _OPEN
            if not is_open and not self._is_untold(slot):
                self._recorder.complete(message, time.monotonic_ns())
            if message.end_ns is not None or not is_open:
                del self._until_waited[slot]
                ended.append(slot)
        return ended

    def waited(self, slot: int, end_ns: int, *, failed: bool) -> None:
        """Says that whoever holds a message has waited for it.

        Args:
            slot: Of its launch.
            end_ns: When the wait ended.
            failed: Whether it raised.
        """
        at = slot * _FIELDS
        if self._slots[at + _STATE] == _OPEN:
            self._slots[at + _ENDED] = self._slots[at + _ENDED] or end_ns
            self._slots[at + _STATE] = _FAILED if failed else _OK

    @property
    def followed(self) -> list[int]:
        """The slots of messages that are being followed."""
        return list(self._followed)

    def abandon(self) -> None:
        """In a forked child, where nothing ends any more."""
        self._followed.clear()
        self._until_waited.clear()

    def is_over(self, slot: int) -> bool:
        """Whether a message has ended, or nobody will tell its end any more."""
        return bool(self._slots[slot * _FIELDS + _STATE] != _OPEN)

    def of_ended(
        self, slots: Integers, enqueue_ns: Integers, waited_once: Booleans
    ) -> tuple[Booleans, Integers, Integers, Integers]:
        """What Gloo's threads took down of messages that nobody follows.

        Args:
            slots: Of their launches.
            enqueue_ns: When they were launched.
            waited_once: Whether only a wait of whoever holds them completes them.

        Returns:
            Whether they are over; and of those their start, their end, and their status as a number
            of `STATUSES`. Without an end, -1, they never will be told to have ended.
        """
        state = self._slot_table[slots, _STATE]  # before the times, which are set before it
        times = self._slot_table[slots]
        ended = times[:, _ENDED]
        is_told = ended != 0
        is_left_open = waited_once & (state == _GONE) & ~is_told
        # What else nobody told the end of is over by now.
        untold = np.where(is_left_open, -1, time.monotonic_ns())
        start = np.where(is_told, started(times[:, _BEGAN], enqueue_ns, ended), enqueue_ns)
        status = np.where(is_left_open, _LEFT_OPEN, _STATUS_OF_STATE[state])
        return state != _OPEN, start, np.where(is_told, ended, untold), status

    def _is_untold(self, slot: int) -> bool:
        """Whether a message is gone of which nothing has ended."""
        return self.is_gone(slot) and not self._slots[slot * _FIELDS + _ENDED]

    def settle(self, message: Message) -> None:
        """Puts in the times that Gloo's threads took down."""
        told = self._told(message.slot, message.enqueue_ns)
        if told is not None:
            message.start_ns, message.end_ns = told
        if self._slots[message.slot * _FIELDS + _STATE] == _FAILED:
            message.status = "failed"

    def _told(self, slot: int, enqueue_ns: int) -> tuple[int, int] | None:
        """Start and end of a message, if its end was told."""
        at = slot * _FIELDS
        began, ended = self._slots[at + _BEGAN], self._slots[at + _ENDED]
        return (int(started(began, enqueue_ns, ended)), ended) if ended else None


def started(began_ns: Any, enqueue_ns: Any, ended_ns: Any) -> Any:
    """When messages began: Gloo's thread may come to say so later than the job went on."""
    return np.minimum(np.maximum(began_ns, enqueue_ns), ended_ns)
