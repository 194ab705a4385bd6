"""Bounds on clock offsets, derived from the messages of a trace.

No rank leaves a collective before the last one has entered it, no receive ends before its send
began, no rank completes a broadcast before its root has entered it, and no root completes a
reduction before all contributors have entered it. Each of these facts bounds the offset between two
clocks from one side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import IntArray, memory_of
from ddltrace.analyzer.trace.clock_fit import Bounds
from ddltrace.tracer.trace.arrow_arrays import integers, scalar, strings
from ddltrace.tracer.trace.run_info import RankInfo

CLOCK_COLUMNS: Final = (
    *("start_ns", "end_ns", "enqueue_ns", "kind", "status", "op", "group", "seq", "peer", "tag"),
    *("bytes", "out_bytes"),
)
"""The columns that `process_times` needs."""

_FROM_ALL_TO_ALL: Final = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Each rank's result needs every rank's part. (In an all_to_all a part may be empty.)"""
_FROM_ROOT: Final = ("broadcast", "scatter")
_TO_ROOT: Final = ("reduce", "gather")

_KEY: Final = ["generation", "members", "group", "op", "seq", "source", "destination", "tag"]
MAX_PROCESSES: Final = 16
"""Maximum number of processes per clock whose messages are used: all of them give the same
bounds."""

_MAX_BOUNDS: Final = 2048
"""Maximum number of bounds of one side, the tightest one per period of time."""

_MAX_KEYS: Final = 1 << 62

_NO_WORD: Final = scalar("")
_ZERO: Final = scalar(0)
_NOBODY: Final = scalar(-1)

_DEVICE_SLACK_NS: Final = 50_000
"""Error of the conversion of ends on a device to the host's clock."""


@dataclass(frozen=True)
class MessageTimes:
    """Message times of the processes of one clock.

    Attributes:
        starts: Per message, by `_KEY`, the `time` when the last of them entered it.
        ends: The same when the first of them left it.
    """

    starts: pa.Table
    ends: pa.Table


@dataclass(frozen=True)
class ProcessTimes:
    """Times of one process, on its own clock.

    Attributes:
        messages: Its messages; None if there are none.
        first: Start of its first event, ns; None without events.
        last: End of its last event.
    """

    messages: MessageTimes | None
    first: int | None
    last: int | None


def process_times(info: RankInfo, tables: Iterable[pa.Table], generation: int) -> ProcessTimes:
    """Gathers the messages of one process, and the time that its events span.

    Args:
        info: The process.
        tables: Its events on its own clock, some at a time.
        generation: Generation of the process; message numbers restart in each generation.
    """
    found, first, last = [], None, None
    for events in tables:
        if not events.num_rows:
            continue
        start, end = events["start_ns"], events["end_ns"]
        begin, until = pc.min(start).as_py(), pc.max(pc.coalesce(end, start)).as_py()
        first = begin if first is None else min(first, begin)
        last = until if last is None else max(last, until)
        rows = _messages(info, events, generation)
        if rows.num_rows:
            found.append(rows)
    if not found:
        return ProcessTimes(None, first, last)
    rows = pa.concat_tables(found)
    messages = MessageTimes(
        starts=_one_of_each(rows.filter(rows["gives"]), "start", np.maximum),
        ends=_one_of_each(rows.filter(rows["takes"]), "end", np.minimum),
    )
    return ProcessTimes(messages, first, last)


def message_times(processes: Iterable[ProcessTimes]) -> MessageTimes | None:
    """Combines the messages of the processes of one clock; None if there are none."""
    parts = [each.messages for each in processes if each.messages is not None]
    if not parts:
        return None
    starts = pa.concat_tables([part.starts for part in parts])
    ends = pa.concat_tables([part.ends for part in parts])
    return MessageTimes(
        starts=_one_of_each(starts, "time", np.maximum),
        ends=_one_of_each(ends, "time", np.minimum),
    )


def message_bounds(here: MessageTimes, there: MessageTimes) -> Bounds | None:
    """Bounds on the offset of one clock to another from the messages between them.

    Args:
        here: Messages of processes on the one clock.
        there: Messages of processes on the other.

    Returns:
        Bounds on what must be added to the one clock to give the other; None if no message
        went between them both ways.
    """
    low_own, low_other = _times_of_both(here.ends, there.starts)
    high_own, high_other = _times_of_both(here.starts, there.ends)
    if not len(low_own) or not len(high_own):
        return None
    lows, highs = low_other - low_own, high_other - high_own
    base = int(np.median(highs))
    return Bounds.joined(
        [
            _one_side(low_own, lows - base, base, lower=True),
            _one_side(high_own, highs - base, base, lower=False),
        ]
    )


def _times_of_both(own: pa.Table, other: pa.Table) -> tuple[IntArray, IntArray]:
    """The times of the messages that are in both tables."""
    keys = _keys(pa.concat_tables([own, other]))
    _, here, there = np.intersect1d(
        keys[: own.num_rows], keys[own.num_rows :], assume_unique=True, return_indices=True
    )
    return _values(own, "time")[here], _values(other, "time")[there]


def _one_of_each(rows: pa.Table, name: str, best: np.ufunc) -> pa.Table:
    """One row of each message, with the greatest or the least of a time."""
    keys, times = _keys(rows), _values(rows, name)
    order = np.argsort(keys, kind="stable")
    firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    found = best.reduceat(times[order], firsts) if len(rows) else firsts
    first_rows, time = (integers(values) for values in (order[firsts], found))
    return rows.select(_KEY).take(first_rows).append_column("time", time)


def _keys(rows: pa.Table) -> IntArray:
    """A number from 0 on for each row: the same for those that have `_KEY` in common.

    Arrow's own grouping and joining import pandas, which takes longer than both.
    """
    keys, span = np.zeros(rows.num_rows, np.int64), 1
    if not rows.num_rows:
        return keys
    for name in _KEY:
        values = _values(rows, name)
        least = int(values.min())
        count = int(values.max()) - least + 1
        if span * count >= _MAX_KEYS:
            distinct, keys = np.unique(keys, return_inverse=True)
            span = len(distinct)
        if span * count >= _MAX_KEYS:
            distinct, values = np.unique(values, return_inverse=True)
            least, count = 0, len(distinct)
        keys, span = keys * count + (values - least), span * count
    return keys


def _values(rows: pa.Table, name: str) -> IntArray:
    """A column without nulls; of words, the number of each."""
    chunks = rows[name].chunks
    if not chunks:
        return np.empty(0, np.int64)
    column = pa.concat_arrays(chunks)
    if pa.types.is_string(column.type):
        column = pc.dictionary_encode(column).indices
    return memory_of(column).astype(np.int64)


def _one_side(x: IntArray, value: IntArray, base: int, *, lower: bool) -> Bounds:
    edges = np.linspace(x.min(), x.max(), _MAX_BOUNDS)
    stretch = np.searchsorted(edges, x)
    order = np.lexsort((-value if lower else value, stretch))
    rows = order[np.unique(stretch[order], return_index=True)[1]]
    known = value[rows].astype(np.float64)
    none = np.full(len(rows), -np.inf if not lower else np.inf)
    low, high = (known, none) if lower else (none, known)
    return Bounds(x[rows], low, high, base)


def _messages(info: RankInfo, events: pa.Table, generation: int) -> pa.Table:
    """The completed messages among a process's events, and whether each gives or takes."""
    events = events.filter(_complete(events))
    op, group = (
        pc.coalesce(pc.cast(events[name], pa.string()), _NO_WORD) for name in ("op", "group")
    )
    peer, tag, sent, received = (
        pc.coalesce(pc.cast(events[name], pa.int64()), null)
        for name, null in (
            ("peer", _NOBODY),
            ("tag", _ZERO),
            ("bytes", _ZERO),
            ("out_bytes", _ZERO),
        )
    )
    own = scalar(info.rank)
    known, is_root = pc.greater_equal(peer, _ZERO), pc.equal(peer, own)
    # Without a byte to carry, a library may return at once.
    carries = pc.or_(pc.greater(sent, _ZERO), pc.greater(received, _ZERO))
    everyone = pc.and_(
        _is_one_of(op, _FROM_ALL_TO_ALL), pc.or_(carries, _is_one_of(op, ["barrier"]))
    )
    from_root = _is_one_of(op, _FROM_ROOT)
    rooted = pc.or_(from_root, _is_one_of(op, _TO_ROOT))
    rooted = pc.and_(rooted, pc.and_(known, carries))
    send = pc.and_(_is_one_of(op, ["send"]), known)
    receive = pc.and_(_is_one_of(op, ["recv"]), known)
    p2p = pc.or_(send, receive)
    against_root = pc.xor(is_root, from_root)
    gives = pc.or_(pc.or_(everyone, send), pc.and_(rooted, pc.invert(against_root)))
    takes = pc.or_(pc.or_(everyone, receive), pc.and_(rooted, against_root))
    slack = scalar(_DEVICE_SLACK_NS if info.device != "cpu" else 0)
    named = {one.name: _digest(one.ranks) for one in info.groups}
    members = strings(list(named.values())).take(pc.index_in(group, value_set=strings(list(named))))
    rows = pa.table(
        {
            "generation": integers(np.full(events.num_rows, generation)),
            "group": group,
            "members": pc.coalesce(members, _NO_WORD),
            "op": pc.if_else(p2p, scalar("p2p"), op),
            "seq": events["seq"],
            "source": pc.if_else(p2p, pc.if_else(send, own, peer), _NOBODY),
            "destination": pc.if_else(p2p, pc.if_else(send, peer, own), _NOBODY),
            "tag": pc.if_else(p2p, tag, _ZERO),
            "start": pc.min_element_wise(events["start_ns"], events["enqueue_ns"]),
            "end": pc.add(events["end_ns"], slack),
            "gives": gives,
            "takes": takes,
        }
    )
    return rows.filter(pc.or_(gives, takes))


def _digest(members: Sequence[int]) -> str:
    """A short text for the members of a group: each message has it, and a group may be large."""
    return hashlib.sha256(str(members).encode()).hexdigest()[:16]


def _complete(events: pa.Table) -> pa.ChunkedArray:
    """Which events are messages that completed successfully."""
    ended = pc.and_(pc.is_valid(events["seq"]), pc.is_valid(events["end_ns"]))
    kind, status = (pc.cast(events[name], pa.string()) for name in ("kind", "status"))
    good = pc.and_(_is_one_of(kind, ["message"]), _is_one_of(status, ["ok"]))
    return pc.and_(good, ended)


def _is_one_of(words: pa.ChunkedArray, which: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(words, value_set=strings(which))
