"""The buffer between the job's threads and the writer.

The hot path appends four integers to one flat list: site, start, end, thread. A *site* is a
combination of kind, name and tensor with a number. The garbage collector does not traverse a flat
list of integers, and ``extend`` with a tuple is atomic. Messages are rarer and have more values;
each is one object. Messages that C++ records have one shared object, a *pattern*, for their common
values, and a row of integers each.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from ddltrace.tracer.trace.schema import KINDS, MESSAGE_FIELDS, OWN_FIELDS, PHASES

if TYPE_CHECKING:
    from ddltrace.tracer.trace.arrow_arrays import Integers

KIND_CODE: Final = {kind: code for code, kind in enumerate(KINDS)}
PHASE_CODE: Final = {phase: code for code, phase in enumerate(PHASES)}
_OTHER: Final = PHASE_CODE["other"]
_MAX_SITES: Final = 1 << 18

_LAST_ENDS_NS: Final = 3_000_000_000
"""How long messages may end after recording was switched off."""

BY_TIME: Final = -1
"""Phase of a message that takes step and phase from the time at which it was enqueued."""


class Message:
    """One collective, send or receive of this rank, from enqueue to completion.

    It has an attribute for each of `MESSAGE_FIELDS`; see there.

    Attributes:
        settle: Called at its end: sets more precise times from another source.
        slot: Slot in which Gloo's threads record its times; -1 if they do not.
        shown_open: Whether a row of the open message was taken.
    """

    __slots__ = (*MESSAGE_FIELDS, "settle", "shown_open", "slot")

    def __init__(
        self,
        id_: int,
        op: str,
        group: str,
        enqueue_ns: int,
        seam: str,
        *,
        step: int | None = None,
        phase: int = _OTHER,
    ) -> None:
        self.id = id_
        self.op = op
        self.group = group
        self.enqueue_ns = enqueue_ns
        self.start_ns = enqueue_ns
        self.end_ns: int | None = None
        self.name: str = op
        self.seq: int | None = None
        self.peer: int | None = None
        self.tag: int | None = None
        self.bytes: int | None = None
        self.out_bytes: int | None = None
        self.dtype: str | None = None
        self.status = "open"
        self.clock: str | None = None
        self.seam = seam
        self.buffer: int | None = None
        self.settle: Callable[[Message], None] | None = None
        self.slot = -1
        self.tensors: list[int] | None = None
        self.step = step
        self.phase = phase
        self.shown_open = False


class Launched:
    """A message whose values are recorded by C++ and the writer; represents it until its end.

    Args:
        id_: Its number.
        like: The pattern with the values that it shares with other messages.
        place: Slot in which a wait of the handle's holder is recorded; -1 if the end is known
            without it.
    """

    __slots__ = ("id", "like", "place")

    def __init__(self, id_: int, like: Message, place: int = -1) -> None:
        self.id = id_
        self.like = like
        self.place = place

    @property
    def name(self) -> str:
        """Name shown in the timeline."""
        return self.like.name


Site: TypeAlias = tuple[int, str, int, int, int, int, int, int]
"""A recording site: kind code, name, tensor id or -1, and `SITE_NUMBERS` or -1."""

SITE_NUMBERS: Final = ("bytes", "out_bytes", "samples", "tokens", "flops")
"""Columns that all events of a site share."""

REPEAT_FIELDS: Final = ("pattern", *OWN_FIELDS)
"""Fields of a row of `Recorder.repeats`, -1 for null; pattern, status and clock are numbers."""


def or_null(value: int | None) -> int:
    """Encodes an optional integer for a table of integers."""
    return -1 if value is None else value


def value_of(integer: int) -> int | None:
    """Decodes the result of `or_null`."""
    return None if integer == -1 else integer


FLAT_CELLS: Final = 4
"""Number of integers in a row of `Recorder.flat`; the first is the site."""

WAIT_CELLS: Final = FLAT_CELLS + 1
"""Number of integers in a row of `Recorder.waits`; the last is the message's id."""


def _integers() -> array[int]:
    return array("q")


@dataclass
class Taken:
    """The events taken out of a recorder.

    Attributes:
        flat: Rows of four integers, concatenated; see `Recorder`.
        ended: Messages that have completed or failed.
        open: Messages that were open, each taken once.
        waits: Waits of the host for messages.
        step_changes: Changes of the step: time, value, time, value.
        phase_changes: Changes of the phase, in the same format.
        repeats: Rows of `REPEAT_FIELDS`, concatenated.
    """

    flat: array[int] = field(default_factory=_integers)
    ended: list[Message] = field(default_factory=list)
    open: list[Message] = field(default_factory=list)
    waits: array[int] = field(default_factory=_integers)
    step_changes: array[int] = field(default_factory=_integers)
    phase_changes: array[int] = field(default_factory=_integers)
    repeats: array[int] = field(default_factory=_integers)

    @property
    def rows(self) -> int:
        """Maximum number of rows that it produces."""
        messages = len(self.ended) + len(self.open) + len(self.repeats) // len(REPEAT_FIELDS)
        return len(self.flat) // FLAT_CELLS + messages + len(self.waits) // WAIT_CELLS

    def extend(self, later: Taken) -> None:
        """Adds events that were taken later."""
        self.flat += later.flat
        self.ended += later.ended
        self.open += later.open
        self.waits += later.waits
        self.step_changes += later.step_changes
        self.phase_changes += later.phase_changes
        self.repeats += later.repeats


class Recorder:
    """Collects events from any thread; the writer takes them out.

    Attributes:
        flat: Rows of four integers (site, start_ns, end_ns, thread ident), concatenated.
        more: Further rows that were added in blocks.
        emit: Appends one row: ``emit((site, start_ns, end_ns, ident))``; the caller must have
            checked `limit`. Outside the hot path, use `add`.
        limit: Length of `flat` beyond which the hot path drops its events.
        dropped: Events dropped.
        paused: Whether the patches leave this step unrecorded, to measure the overhead.
        off: Whether recording is switched off, and the patches are out.
        rests_from_ns: While it is off: from when the writer has nothing to do.
        detailed: Whether layers and gradients are recorded.
        sites: Every site, by its number.
        collectors: Functions that add completed events; the writer calls them before it takes
            events.
        other_buffers: Functions that return the used share of a buffer that a collector empties.
        finished: Completed messages, not yet written.
        patterns: Values that repeated messages share, by pattern number.
        repeats: Completed repeated messages: rows of `REPEAT_FIELDS`, concatenated.
        open: Messages that have not completed, by id.
        splits: What all-to-alls send to each member of their group, by id, until it is written.
        waits: Waits of the host for messages: rows of `WAIT_CELLS`, concatenated.
        step: Number of the current step; None outside steps.
    """

    def __init__(self, buffer_rows: int, *, detailed: bool = True) -> None:
        self.flat: list[int] = []
        self.more = array("q")
        self.emit = self.flat.extend
        self.limit = buffer_rows * FLAT_CELLS
        self.buffer_rows = buffer_rows
        self.dropped = 0
        self.paused = False
        self.off = False
        self.rests_from_ns = 0
        self.detailed = detailed
        self.sites: list[Site] = []
        self.collectors: list[Callable[[], None]] = []
        self.other_buffers: list[Callable[[], float]] = []
        self._site_of: dict[Site, int] = {}
        self._wait_sites: dict[str, int] = {}
        # Reentrant: a signal handler of the job may communicate in the middle of our code.
        self._lock = threading.RLock()
        self.finished: list[Message] = []
        self.patterns: list[Message] = []
        self.repeats = array("q")
        self.open: dict[int, Message] = {}
        self.splits: dict[int, list[int]] = {}
        self.waits: list[int] = []
        self._message_numbers = itertools.count()
        self.step: int | None = None
        # Time and new value of each change; the writer derives the phase and step of every row from
        # them, so that the hot path does not have to.
        self.phase_changes: list[int] = []
        self.step_changes: list[int] = []
        self._max_changes = 4 * buffer_rows
        self._phase_stack: list[int] = [_OTHER]

    def site(
        self,
        kind: str,
        name: str,
        tensor: int = -1,
        size: int = -1,
        out_size: int = -1,
        *,
        samples: int = -1,
        tokens: int = -1,
        flops: int = -1,
    ) -> int:
        """The number of a recording site; the same arguments give the same number.

        Args:
            kind: Kind of the pattern's events.
            name: Name shown in the timeline.
            tensor: Id of the parameter that the events refer to, or -1.
            size: The events' ``bytes``, or -1.
            out_size: The events' ``out_bytes``, or -1.
            samples: The events' ``samples``, or -1.
            tokens: The events' ``tokens``, or -1.
            flops: The events' ``flops``, or -1.
        """
        key = (KIND_CODE[kind], name, tensor, size, out_size, samples, tokens, flops)
        with self._lock:
            number = self._site_of.get(key)
            if number is None:
                if len(self.sites) >= _MAX_SITES:
                    # Beyond the limit, all further names share one site.
                    key = (KIND_CODE[kind], "(too many names)", -1, -1, -1, -1, -1, -1)
                    if key in self._site_of:
                        return self._site_of[key]
                number = self._site_of[key] = len(self.sites)
                self.sites.append(key)
        return number

    def record(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        """Records one event outside the hot path."""
        self.add(self.site(kind, name), start_ns, end_ns, threading.get_ident())

    def add(self, site: int, start_ns: int, end_ns: int, thread: int) -> None:
        """Appends one row, or counts it as dropped if the buffer is full."""
        if len(self.flat) > self.limit:
            self.dropped += 1
        else:
            self.emit((site, start_ns, end_ns, thread))

    def add_rows(self, rows: memoryview) -> None:
        """Appends concatenated rows; rows beyond the buffer's limit are counted as dropped.

        Args:
            rows: Integers of 64 bits.
        """
        capacity = max(0, self.limit - len(self.flat) - len(self.more)) // FLAT_CELLS * FLAT_CELLS
        try:
            self.more.frombytes(rows[:capacity].cast("B"))
        except MemoryError:
            capacity = 0
        self.dropped += len(rows[capacity:]) // FLAT_CELLS

    def add_wait(self, start_ns: int, end_ns: int, message: int, name: str) -> None:
        """Appends a wait of this thread, or counts it as dropped if the buffer is full.

        Args:
            start_ns: When it began.
            end_ns: When it ended.
            message: Id of the message; -1 if it is not known.
            name: Name shown in the timeline.
        """
        if message < 0:
            self.add(self.site("wait", name), start_ns, end_ns, threading.get_ident())
        elif len(self.waits) < WAIT_CELLS * self.buffer_rows:
            site = self._wait_sites.get(name)
            if site is None:  # runs in every wait: takes no lock and builds no key
                site = self.site("wait", name)
                if len(self._wait_sites) < _MAX_SITES:
                    self._wait_sites[name] = site
            self.waits.extend((site, start_ns, end_ns, threading.get_ident(), message))
        else:
            self.dropped += 1

    def enter_phase(self, phase: int, now_ns: int) -> None:
        """Begins a phase; phases nest, and the innermost one counts."""
        self._phase_stack.append(phase)
        self._change(self.phase_changes, now_ns, phase, _OTHER)

    def leave_phase(self, now_ns: int) -> None:
        """Ends the innermost phase."""
        if len(self._phase_stack) > 1:
            self._phase_stack.pop()
        self._change(self.phase_changes, now_ns, self._phase_stack[-1], _OTHER)

    @property
    def phase(self) -> int:
        """Code of the current phase."""
        return self._phase_stack[-1]

    def set_step(self, number: int | None, now_ns: int) -> None:
        """Sets the current step; None is outside steps."""
        self.step = number
        self._change(self.step_changes, now_ns, -1 if number is None else number, -1)

    def switch(self, on: bool, now_ns: int) -> None:
        """Switches recording on or off; the phase is then that outside of all phases."""
        if not on:
            self.set_step(None, now_ns)
        self.off = self.paused = not on
        self.rests_from_ns = now_ns + _LAST_ENDS_NS
        del self._phase_stack[1:]
        self._change(self.phase_changes, now_ns, _OTHER, _OTHER)

    def rests(self) -> bool:
        """Whether nothing is recorded, and nothing that ends is left."""
        return self.off and time.monotonic_ns() > self.rests_from_ns

    def _change(self, changes: list[int], now_ns: int, value: int, unknown: int) -> None:
        """Records a change; the last one that fits in the buffer sets the value to unknown."""
        if self.off:
            return
        capacity = self._max_changes - len(changes)
        if capacity > 0:
            changes.extend((now_ns, value if capacity > 2 else unknown))

    def new_id(self) -> int:
        """Returns a number for a message that is registered later."""
        return next(self._message_numbers)

    def new_message(
        self, op: str, group: str, enqueue_ns: int, seam: str, number: int | None = None
    ) -> Message:
        """Registers a message that has just been handed to the communication library.

        Args:
            op: Public name of the operation.
            group: Name of its group.
            enqueue_ns: When it was launched.
            seam: Where it was seen, one of `SEAMS`.
            number: Its `new_id`, if it has one already.
        """
        if number is None:
            number = self.new_id()
        message = Message(
            number, op, group, enqueue_ns, seam, step=self.step, phase=self._phase_stack[-1]
        )
        if len(self.open) + len(self.finished) < self.buffer_rows:
            self.open[number] = message
        else:
            self.dropped += 1
            self.splits.pop(number, None)
        return message

    def keep_splits(self, message: int, split_bytes: list[int] | None) -> None:
        """Stores what an open all-to-all sends to each member of its group.

        Args:
            message: Its id.
            split_bytes: The bytes; None if they are not known.
        """
        if split_bytes is not None and message in self.open:
            self.splits[message] = split_bytes

    def add_repeats(self, rows: Integers) -> None:
        """Adds completed messages; rows beyond the buffer's limit are counted as dropped.

        Args:
            rows: Rows of `REPEAT_FIELDS`; the id is -1 for messages without an id.
        """
        capacity = self.buffer_rows - len(self.repeats) // len(REPEAT_FIELDS)
        self.dropped += max(0, len(rows) - capacity)
        if self.splits:
            for dropped in rows[max(0, capacity) :, REPEAT_FIELDS.index("id")].tolist():
                self.splits.pop(dropped, None)
        rows = rows[: max(0, capacity)]
        ids = rows[:, REPEAT_FIELDS.index("id")]
        ids[ids == -1] = [self.new_id() for _ in range(np.count_nonzero(ids == -1))]
        self.repeats.frombytes(rows.tobytes())

    def filled(self) -> float:
        """The used share of the fullest buffer."""
        rows = max(
            (len(self.flat) + len(self.more)) // FLAT_CELLS,
            len(self.finished),
            len(self.waits) // WAIT_CELLS,
            len(self.repeats) // len(REPEAT_FIELDS),
            max(len(self.step_changes), len(self.phase_changes)) // 4,
        )
        return max(rows / max(1, self.buffer_rows), *(used() for used in self.other_buffers), 0.0)

    def take(self) -> Taken:
        """Takes all events out, on the writer's thread, while other threads continue recording."""
        flat, more = array("q", self.flat[:]), self.more[:]
        taken = Taken(
            flat=flat + more,
            ended=self.finished[:],
            waits=array("q", self.waits[:]),
            repeats=self.repeats[:],
        )
        taken.open = [message for message in list(self.open.values()) if not message.shown_open]
        # Changes are taken after the rows: a row without its change would get the wrong step, but a
        # change without rows is harmless.
        taken.step_changes = array("q", self.step_changes[:])
        taken.phase_changes = array("q", self.phase_changes[:])
        # Nothing is removed before everything is copied, because memory may run out.
        for message in taken.open:
            message.shown_open = True
        buffers: tuple[tuple[list[Any] | array[int], int], ...] = (
            (self.flat, len(flat)),
            (self.more, len(more)),
            (self.finished, len(taken.ended)),
            (self.waits, len(taken.waits)),
            (self.repeats, len(taken.repeats)),
            (self.step_changes, len(taken.step_changes)),
            (self.phase_changes, len(taken.phase_changes)),
        )
        for buffer, length in buffers:
            del buffer[:length]
        return taken

    def close_after_fork(self) -> None:
        """Stops recording in a forked child, which has no writer."""
        self.limit = -1
        self.buffer_rows = self._max_changes = 0
        changes = (self.phase_changes, self.step_changes)
        for buffer in (self.flat, self.more, self.finished, self.waits, self.repeats, *changes):
            del buffer[:]
        self.open.clear()
        self.splits.clear()
        self._lock = threading.RLock()  # another thread may have held it during the fork

    def release(self, message: Message) -> None:
        """Ends a message at a time that nobody observes."""
        if self.open.pop(message.id, None) is not None:
            message.status = "ok"
            self.finished.append(message)

    def complete(self, message: Message, end_ns: int, clock: str, status: str = "ok") -> None:
        """Ends a message; only the first call for a message counts.

        Args:
            clock: What that was read from, one of `CLOCKS`.
            status: Its new status.
        """
        if self.open.pop(message.id, None) is None:
            return
        message.end_ns = end_ns
        message.clock = clock
        message.status = status
        if message.settle is not None:
            settle, message.settle = message.settle, None
            settle(message)
        self.finished.append(message)
