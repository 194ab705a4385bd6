"""Records repeated messages in C++, because a call to Python costs more than the recording.

DistributedDataParallel sends the same buckets and buffers in every step. Between two layers, none
of the tracer's Python code is in a cache, so a call to it for each message is the most expensive
part of recording. Therefore, a message that Python has recorded once is registered with
`native/gloo_messages.cpp`, which from then on records only its launch time and its number. The
writer thread adds the other values here, as one row of integers for each completed message.

Launches by Python that bypass the Python kernels (`python_launches.py`) use the same ring: C++
records the launch, and Python then sets the pattern. An object for each message, which lives until
it is written, would not be in a cache and would add work for the garbage collector.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from ddltrace.tracer.interpose.c10d.arguments import name_of
from ddltrace.tracer.native.layout import CONTROL, MESSAGE
from ddltrace.tracer.record.recorder import (
    BY_TIME,
    REPEAT_FIELDS,
    Launched,
    Message,
    Recorder,
    or_null,
    value_of,
)
from ddltrace.tracer.trace.schema import BUCKET, CLOCKS, OWN_FIELDS, SHARED_FIELDS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import torch

    from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.trace.arrow_arrays import Integers

_BACKWARD_THREAD: Final = CONTROL["backward_thread"]
_BROADCAST_THREAD: Final = CONTROL["broadcast_thread"]
_PAUSED: Final = CONTROL["paused"]
_LAUNCHED: Final = CONTROL["launched"]
_BUCKETS: Final = CONTROL["buckets"]
_TAKEN: Final = CONTROL["taken"]
_WHAT: Final = MESSAGE["what"]
_ENQUEUE: Final = MESSAGE["enqueue_ns"]
_NUMBER: Final = MESSAGE["number"]
_BYTES: Final = MESSAGE["bytes"]
_OUT_BYTES: Final = MESSAGE["out_bytes"]
_ROOT: Final = MESSAGE["root"]
_ID: Final = MESSAGE["id"]
_PASSED: Final = MESSAGE["passed"]
# Values of the field `_WHAT`; see `What` in `gloo_messages.cpp`.
_FREE: Final = 0
_LAUNCHING: Final = 1
_LEFT_OUT: Final = 2
_UNDER_WAY: Final = 3
_FIRST: Final = 4
_UNKNOWN: Final = 0
_OF_WAIT: Final = CLOCKS.index("wait")

_SAME_IN_RING: Final = {name: MESSAGE[name] for name in OWN_FIELDS if name in MESSAGE.fields}
_ENQUEUE_OF_REPEAT: Final = REPEAT_FIELDS.index("enqueue_ns")
_KNOWN_BEFORE_THE_END: Final = [
    name
    for name in OWN_FIELDS
    if name not in {"id", "enqueue_ns", "start_ns", "end_ns", "status", "clock"}
]

_OF_CPP: Final = -1  # in place of an id
_NULL: Final = -1
_MAX_PATTERNS: Final = 1 << 14
_PATIENCE_NS: Final = 2_000_000_000


Like: TypeAlias = "tuple[str, str, torch.dtype | None, tuple[int, ...] | None, int | None]"
"""Values that launches by Python share: operation, name, element type, parameters and tag."""

_Over: TypeAlias = tuple[int, int, int, int]
"""A range of launched messages that ended with a wait of the job: number of the first, number after
the last, kind of wait (see `_Kind.ended_by`), and the latest time of their ends. Gloo's thread may
report these ends later."""


class _Kind(NamedTuple):
    """Properties of all messages of a pattern, in addition to the values of the pattern.

    Attributes:
        group: Process group of the messages.
        ended_by: The wait of the job after which these messages have ended: `_BACKWARD_THREAD`,
            `_BROADCAST_THREAD`, or None if the job waits for each message.
        waited_once: See `KnownMessages.launched`.
    """

    group: Group
    ended_by: int | None
    waited_once: bool = False


class KnownMessages:
    """Creates messages from the records of C++.

    Args:
        library: The native library, which records them.
        times: Follows the messages to their end.
        recorder: Receives the messages.
    """

    def __init__(self, library: NativeLibrary, times: GlooTimes, recorder: Recorder) -> None:
        self._library = library
        self._control = library.control
        self._ring = library.ring
        self._ring_table = np.frombuffer(library.ring, np.int64).reshape(-1, len(MESSAGE))
        self._fields = len(MESSAGE)
        self._size = len(library.ring) // len(MESSAGE)
        self._times = times
        self._recorder = recorder
        self._sees = False
        self._taken = self._control[_TAKEN] = self._control[_LAUNCHED]
        self._buckets = 0
        self._launched_before = {_BACKWARD_THREAD: 0, _BROADCAST_THREAD: 0}
        self._kinds: list[_Kind] = []  # one per pattern of the recorder
        self._pattern_of: dict[Hashable, int] = {}  # of the patterns that `launched` created
        self._over: deque[_Over] = deque(maxlen=self._size)
        # Numbers of messages in flight that may be in `_over`, by slot.
        self._may_be_over: dict[int, int] = {}
        # Never blocks: a signal handler of the job may have interrupted the holder. Messages that
        # the handler sends are recorded in Python.
        self._adding = threading.Lock()
        self._collecting = threading.Lock()
        recorder.other_buffers.append(self.filled)

    def filled(self) -> float:
        """Returns the used share of the ring, 0 to 1."""
        return (self._control[_LAUNCHED] - self._taken) / self._size

    def see_launches(self) -> bool:
        """Registers the C++ kernels, which then see all launches; to be called once.

        Returns:
            Whether C++ sees all launches.
        """
        self._sees = bool(self._library.see_launches())
        return self._sees

    def begin_backward(self) -> None:
        """Begins a backward pass: C++ compares this thread's all-reduces with known messages."""
        self._buckets = self._control[_BUCKETS]
        self._begin(_BACKWARD_THREAD)

    def end_backward(self, now_ns: int) -> int:
        """Ends the backward pass and marks its known messages as ended.

        Args:
            now_ns: The time.

        Returns:
            How many were recorded without Python since the beginning.
        """
        self._end(_BACKWARD_THREAD, now_ns)
        return self._control[_BUCKETS] - self._buckets

    def begin_broadcasts(self) -> None:
        """Begins broadcasts launched by C++, which are compared with known messages."""
        self._begin(_BROADCAST_THREAD)

    def end_broadcasts(self, now_ns: int) -> None:
        """Ends broadcasts launched by C++ and marks their messages as ended.

        Args:
            now_ns: The time.
        """
        self._end(_BROADCAST_THREAD, now_ns)

    def is_broadcasting(self) -> bool:
        """Whether broadcasts of this thread are compared with known messages."""
        return self._control[_BROADCAST_THREAD] == threading.get_ident()

    def add(self, message: Message, group: Group) -> int | None:
        """Registers the message that this thread is launching, and all similar ones, as known.

        Args:
            message: The message as recorded in Python.

        Returns:
            The argument of `activate`; None if the message cannot be registered.
        """
        if self._library.passing() != _UNKNOWN or not self._adding.acquire(blocking=False):
            return None
        try:
            counter = self._counter(group)
            if counter is None:
                return None
            patterns = self._recorder.patterns
            place: int = self._library.make_known(counter, _FIRST + len(patterns))
            if place >= 0:
                ended_by = _BROADCAST_THREAD if message.op == "broadcast" else _BACKWARD_THREAD
                self._append(message, _Kind(group, ended_by))
        finally:
            self._adding.release()
        return place if place >= 0 else None

    def launched(
        self,
        place: int,
        enqueue_ns: int,
        like: Like,
        group: Group,
        *,
        seq: int | None,
        peer: int | None,
        waited_once: bool,
        split_bytes: list[int] | None = None,
    ) -> Launched | None:
        """Describes a message that C++ has launched for Python.

        Args:
            place: Its place in the ring.
            enqueue_ns: When it was launched.
            like: Values that it shares with similar launches.
            seq: Its number in the group.
            peer: Rank in the group of the root, or of the other side.
            waited_once: Whether only a wait of the handle's holder completes it; the caller then
                calls `waited`.
            split_bytes: What an all-to-all sends to each member, if that is known.

        Returns:
            The launched message; None if it must be recorded without the ring.
        """
        ring, at = self._ring, place * self._fields
        if ring[at + _ENQUEUE] != enqueue_ns or ring[at + _WHAT] != _LAUNCHING:
            return None  # given up: this call is too late
        pattern = self._pattern_of.get((like, group.name))
        if pattern is None:
            pattern = self._add_pattern(like, group, waited_once=waited_once)
        if pattern is None or self._times.is_gone(place):
            ring[at + _WHAT] = _LEFT_OUT
            return None
        number = self._recorder.new_id()
        if like[4] is not None:  # a tag: it is between two
            ring[at + (_OUT_BYTES if like[0] == "send" else _BYTES)] = _NULL
        elif like[2] is None:  # PyTorch created a placeholder tensor for the launch
            ring[at + _BYTES] = ring[at + _OUT_BYTES] = 0
        ring[at + _NUMBER] = _NULL if seq is None else seq
        ring[at + _ROOT] = _NULL if peer is None else peer
        ring[at + _ID] = number
        if split_bytes is not None:
            self._recorder.splits[number] = split_bytes
        ring[at + _WHAT] = _FIRST + pattern
        return Launched(number, self._recorder.patterns[pattern], place if waited_once else -1)

    def waited(self, message: Launched, end_ns: int, *, failed: bool) -> None:
        """Records that the holder of a message's handle has waited for it.

        Args:
            end_ns: When the wait ended.
            failed: Whether it raised.
        """
        at = message.place * self._fields
        if self._ring[at + _ID] == message.id and self._ring[at + _WHAT] >= _UNDER_WAY:
            self._times.waited(message.place, end_ns, failed=failed)

    def _add_pattern(self, like: Like, group: Group, *, waited_once: bool) -> int | None:
        op, name, dtype, tensors, tag = like
        message = Message(-1, op, group.name, 0, "method")
        message.name, message.tag = name, tag
        message.dtype = None if dtype is None else name_of(dtype)
        message.tensors = None if tensors is None else list(tensors)
        # The reducer waits for the launches of its Python hook.
        ended_by = _BACKWARD_THREAD if name.startswith(BUCKET) else None
        if not self._adding.acquire(blocking=False):
            return None
        try:
            if len(self._kinds) >= _MAX_PATTERNS:
                return None
            pattern = self._append(message, _Kind(group, ended_by, waited_once))
            self._pattern_of[like, group.name] = pattern
        finally:
            self._adding.release()
        return pattern

    def _append(self, message: Message, kind: _Kind) -> int:
        """Adds a pattern; its properties are stored before the pattern becomes visible."""
        self._kinds.append(kind)
        self._recorder.patterns.append(message)
        return len(self._kinds) - 1

    def activate(self, places: Iterable[int]) -> None:
        """Activates known messages: from now on, they are recorded without Python.

        Args:
            places: Their indices, as returned by `add`.
        """
        for place in places:
            self._library.activate(place)

    def _counter(self, group: Group) -> int | None:
        """Returns the C++ counter of a group's collectives; None if there are too many groups."""
        if group.counter is None:
            counter = self._library.add_counter()
            if counter < 0:
                return None
            group.count_in_cpp(self._library, counter)
        return group.counter

    def passing(self) -> Message | None:
        """The known message that this thread launches while the ring is full."""
        what = self._library.passing()
        return self._recorder.patterns[what - _FIRST] if what >= _FIRST else None

    def forget(self) -> None:
        """Forgets all known messages: Python records them until they are added again."""
        self._library.forget()

    def collect(self) -> None:
        """Creates the messages that C++ has recorded, and completes those that have ended."""
        if not self._collecting.acquire(blocking=False):
            return  # another thread is collecting
        try:
            self._make()
            self._control[_TAKEN] = self._taken  # before slots become free
            for slot in self._times.collect():
                if slot < self._size:
                    self._ring[slot * self._fields + _WHAT] = _FREE
                    self._may_be_over.pop(slot, None)
            self._forget_over()
        finally:
            self._collecting.release()

    def stop(self, timeout_s: float) -> None:
        """Waits until the messages launched so far have ended, at most for the timeout."""
        self.forget()
        deadline = time.monotonic() + timeout_s
        self.collect()
        while self._times.followed and time.monotonic() < deadline:
            time.sleep(0.001)
            self.collect()

    def abandon(self) -> None:
        """Drops all messages, in a forked child, where no message will end."""
        self.forget()
        self._times.abandon()

    def _begin(self, thread: int) -> None:
        if self._sees:
            self._launched_before[thread] = self._control[_LAUNCHED]
            self._control[_PAUSED] = self._recorder.paused
            self._control[thread] = threading.get_ident()

    def _end(self, thread: int, now_ns: int) -> None:
        if self._control[thread] != threading.get_ident():
            return  # it never began, or another thread has begun since
        self._control[thread] = 0
        first, beyond = self._launched_before[thread], self._control[_LAUNCHED]
        if first < beyond:
            self._over.append((first, beyond, thread, now_ns))

    def _make(self) -> None:
        """Reads the launched messages from the ring."""
        launched = self._control[_LAUNCHED]
        while self._taken < launched:
            positions = np.arange(self._taken, launched)
            slots = positions % self._size
            what = self._ring_table[slots, _WHAT]  # before the rest, which is set before it
            rows = self._ring_table[slots]
            is_passed = rows[:, _PASSED] == positions + 1
            is_known, is_left_out = ~is_passed & (what >= _FIRST), ~is_passed & (what == _LEFT_OUT)
            at_work = np.flatnonzero(~(is_passed | is_known | is_left_out))
            count = int(at_work[0]) if len(at_work) else len(what)
            if count:
                is_known[count:] = is_left_out[count:] = False
                self._taken += count
                self._ring_table[slots[is_left_out], _WHAT] = _FREE
                self._take(positions[is_known], slots[is_known], rows[is_known])
            elif self._is_given_up(int(slots[0])):
                self._ring[int(slots[0]) * self._fields + _WHAT] = _LEFT_OUT
            else:
                return  # another thread is still writing it

    def _take(self, positions: Integers, slots: Integers, rows: Integers) -> None:
        """Reads known messages from the ring, except for those in flight.

        Args:
            positions: Numbers of the messages among all launched messages.
            slots: Their slots in the ring.
            rows: Contents of these slots.
        """
        patterns = rows[:, _WHAT] - _FIRST
        kinds = [self._kinds[pattern] for pattern in patterns.tolist()]
        waited_once = np.array([kind.waited_once for kind in kinds], bool)
        is_over, start_ns, end_ns, status, clock = self._times.of_ended(
            slots, rows[:, _ENQUEUE], waited_once
        )
        peers = rows[:, _ROOT].copy()
        for row in np.flatnonzero(peers != _NULL).tolist():
            peers[row] = or_null(kinds[row].group.global_rank(int(peers[row])))
        for row, kind in enumerate(kinds):
            if kind.ended_by is not None and end_ns[row] != _NULL:
                end = self._end_of(int(positions[row]), kind, int(end_ns[row]))
                if end < end_ns[row]:
                    end_ns[row], clock[row] = end, _OF_WAIT
                start_ns[row] = min(start_ns[row], end_ns[row])
        columns = {"pattern": patterns, "start_ns": start_ns, "end_ns": end_ns, "status": status}
        columns |= {"peer": peers, "seq": rows[:, _NUMBER], "clock": clock}
        columns |= {name: rows[:, place] for name, place in _SAME_IN_RING.items()}
        unknown = np.full(len(rows), _NULL)
        repeats = np.stack([columns.get(name, unknown) for name in REPEAT_FIELDS], axis=1)
        self._recorder.add_repeats(repeats[is_over])
        self._ring_table[slots[is_over], _WHAT] = _FREE
        for row in np.flatnonzero(~is_over).tolist():
            self._show(int(positions[row]), int(slots[row]), kinds[row], repeats[row])

    def _show(self, position: int, slot: int, kind: _Kind, repeat: Integers) -> None:
        """Follows a message in flight, so that the trace contains it before its end.

        Args:
            position: Its number among all launched messages.
            slot: Its slot in the ring.
            kind: Event kind of the message's pattern.
            repeat: The message's row of `REPEAT_FIELDS`.
        """
        values = dict(zip(REPEAT_FIELDS, map(value_of, repeat.tolist()), strict=True))
        like = self._recorder.patterns[int(repeat[0])]
        message = self._recorder.new_message(
            like.op, like.group, int(repeat[_ENQUEUE_OF_REPEAT]), like.seam, values["id"]
        )
        message.step, message.phase = None, BY_TIME
        for name in SHARED_FIELDS:
            setattr(message, name, getattr(like, name))
        for name in _KNOWN_BEFORE_THE_END:
            setattr(message, name, values[name])
        self._times.adopt(slot, message, waited_once=kind.waited_once)
        message.settle = functools.partial(self._settle, kind, position)
        self._ring[slot * self._fields + _WHAT] = _UNDER_WAY
        if kind.ended_by is not None:
            self._may_be_over[slot] = position

    def _is_given_up(self, slot: int) -> bool:
        """Whether a message has ended although Python has not set its values for a long time."""
        what, enqueue_ns = self._ring_table[slot, [_WHAT, _ENQUEUE]].tolist()
        is_late = time.monotonic_ns() > enqueue_ns + _PATIENCE_NS
        is_pythons = self._ring_table[slot, _ID] != _OF_CPP
        return bool(what == _LAUNCHING and is_pythons and is_late and self._times.is_over(slot))

    def _settle(self, kind: _Kind, position: int, message: Message) -> None:
        """Sets the times that Gloo's threads recorded, or the end of the job's wait."""
        self._times.settle(message)
        if message.end_ns is not None:
            end = self._end_of(position, kind, message.end_ns)
            if end < message.end_ns:
                message.end_ns, message.clock = end, "wait"
            message.start_ns = min(message.start_ns, message.end_ns)

    def _end_of(self, position: int, kind: _Kind, reported_ns: int) -> int:
        """Returns the end of a message: the reported one, or that of an earlier wait."""
        if kind.ended_by is None:
            return reported_ns
        for first, beyond, with_, by_ns in list(self._over):
            if first <= position < beyond and with_ == kind.ended_by:
                return min(reported_ns, by_ns)
        return reported_ns

    def _forget_over(self) -> None:
        """Removes ranges of `_over` whose messages have all ended."""
        oldest = min(self._may_be_over.values(), default=self._taken)
        while self._over and self._over[0][1] <= oldest:
            self._over.popleft()
