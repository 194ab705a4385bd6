"""When Gloo began and ended each message, told by Gloo's own threads.

A thread of Python that waits for a message wakes up some five times until it is complete, and
each time takes a core and the interpreter from the job. A few lines of C++ (`gloo_times.cpp`)
take down the same two times where they happen, wake nobody, and know what Python cannot: when a
message left Gloo's queue. Without them (no compiler, another PyTorch) there are the reapers.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ddltrace.tracer.recorder import Message, Recorder

_FIELDS: Final = 4  # of a slot: owner, began, ended, state; see gloo_times.cpp
_STATE: Final = 3
_OPEN: Final = 0
_FAILED: Final = 2
_GONE: Final = 3


class GlooTimes:
    """Follows messages of Gloo to their end.

    Args:
        library: What `gloo_times_build.build` made.
        recorder: Whose messages to complete.

    Attributes:
        listens: Whether launches are followed; not before a job's first message of Gloo.
        end_launch: Ends what `begin_launch` has begun. C++ alone: it runs in the way of whatever
            the launch raises, and cannot raise itself.

    Raises:
        OSError: The library does not fit this PyTorch.
    """

    def __init__(self, library: Path, recorder: Recorder) -> None:
        loaded = ctypes.PyDLL(str(library))
        try:
            slots = loaded.ddltrace_slots
            self._begin_launch = loaded.ddltrace_begin_launch
            self.end_launch: Callable[[], None] = loaded.ddltrace_end_launch
        except AttributeError as error:
            raise OSError(f"{library} is not what was built: {error}") from error
        slots.restype = ctypes.c_void_p
        self._begin_launch.argtypes = [ctypes.c_int64]
        loaded.ddltrace_end_launch.restype = None
        num_slots = ctypes.c_int64()
        address = slots(ctypes.byref(num_slots))
        self._num_slots = num_slots.value
        integers = ctypes.c_int64 * (self._num_slots * _FIELDS)
        self._slots = memoryview(integers.from_address(address)).cast("B").cast("q")
        self.listens = False
        self._recorder = recorder
        self._numbers = itertools.count()
        self._followed: dict[int, Message] = {}

    def begin_launch(self) -> int:
        """What this thread launches until `end_launch` is one message.

        Returns:
            The message's slot; -1 if there is none, and then no `end_launch` is due.
        """
        if not self.listens:
            return -1
        slot = next(self._numbers) % self._num_slots
        return slot if slot not in self._followed and self._begin_launch(slot) else -1

    def follow(self, slot: int, message: Message) -> bool:
        """Completes a message when its end is known.

        Args:
            slot: Of its launch.
            message: The message.

        Returns:
            Whether its end will be known.
        """
        if self._slots[slot * _FIELDS + _STATE] == _GONE:
            return False
        message.slot = slot
        message.settle = self._settle
        self._followed[slot] = message
        return True

    def collect(self) -> None:
        """Completes the messages that have ended since the last call."""
        for slot, message in list(self._followed.items()):
            if self._slots[slot * _FIELDS + _STATE] != _OPEN:
                # What nobody told the end of is over by now.
                self._recorder.complete(message, time.monotonic_ns())
                del self._followed[slot]

    def stop(self, timeout_s: float) -> None:
        """Lets the messages launched so far end, but not for longer than the time-out."""
        deadline = time.monotonic() + timeout_s
        self.collect()
        while self._followed and time.monotonic() < deadline:
            time.sleep(0.001)
            self.collect()

    def abandon(self) -> None:
        """In a forked child, where nothing ends any more."""
        self._followed.clear()

    def _settle(self, message: Message) -> None:
        """Puts in the times that Gloo's threads took down."""
        _, began, ended, state = self._slots[message.slot * _FIELDS :][:_FIELDS]
        if ended:
            message.end_ns = ended
            message.start_ns = min(max(began, message.enqueue_ns), ended)
        if state == _FAILED:
            message.status = "failed"
