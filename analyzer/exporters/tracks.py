"""What trace viewers show: rows of events that nest, arrows between them, and their details."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import NULL, memory_of, numbers_of, places_by_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.trace.run_info import TensorInfo

Integers = npt.NDArray[np.int64]

_FIRST_LANES: Final = ("main", "thread", "comm", "stream")
_OUTER_FIRST: Final = ("step", "phase", "data", "layer", "marker", "host")
"""Kinds from the outside in."""


@dataclass(frozen=True)
class Track:
    """One row: a lane, or one of the rows of a lane with overlapping intervals.

    Attributes:
        name: The displayed name.
        rows: Rows of the table, by start, outer intervals before those inside.
    """

    name: str
    rows: Integers


def tracks_of(table: pa.Table, end_ns: Integers) -> list[Track]:
    """Splits a rank's events into tracks.

    Args:
        table: The events.
        end_ns: End of each event; unfinished ones end where the trace does.
    """
    start = table["start_ns"].to_numpy()
    lane = table["lane"].combine_chunks()
    codes = lane.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    names = lane.dictionary.to_pylist()
    kinds = table["kind"].combine_chunks()
    place = [
        _OUTER_FIRST.index(kind) if kind in _OUTER_FIRST else len(_OUTER_FIRST)
        for kind in kinds.dictionary.to_pylist()
    ]
    outer_first = np.array(place or [0])[kinds.indices.to_numpy()]
    found = []
    lanes = sorted(places_by_value(codes), key=lambda each: _lane_key(names, each[0]))
    for code, rows in lanes:
        # Of intervals with the same start the longer one is outside; then a step before its
        # phases, and a phase before what happens in it.
        ordered = rows[np.lexsort((outer_first[rows], -end_ns[rows], start[rows]))]
        name = names[code] if code >= 0 else "events"
        for number, part in enumerate(_nesting(start[ordered], end_ns[ordered])):
            suffix = f" ({number + 1})" if number else ""
            found.append(Track(name + suffix, ordered[part]))
    return found


def ends_of(table: pa.Table) -> Integers:
    """End of each event; what was not finished ends at the last time in the table.

    A message that completed at an unknown time has no length: none takes no time, so that readers
    can tell.
    """
    start = table["start_ns"].to_numpy()
    if not len(start):
        return np.empty(0, dtype=np.int64)
    last = int(start.max())
    end = table["end_ns"].combine_chunks()
    known = end.drop_null().to_numpy()
    if len(known):
        last = max(last, int(known.max()))
    filled: Integers = end.fill_null(last).to_numpy(zero_copy_only=False)
    completed = pc.and_(
        pc.is_null(end), pc.equal(table["status"].combine_chunks().cast("string"), "ok")
    )
    filled = np.where(pc.fill_null(completed, False).to_numpy(zero_copy_only=False), start, filled)
    ends: Integers = np.maximum(filled, start)
    return ends


def _lane_key(names: list[str], code: int) -> tuple[int, str]:
    if code < 0:
        return (len(_FIRST_LANES) + 1, "")
    name = names[code]
    family = name.split("-")[0].split("/")[0]
    place = _FIRST_LANES.index(family) if family in _FIRST_LANES else len(_FIRST_LANES)
    return (place, name)


def _nesting(start: Integers, end: Integers) -> list[Integers]:
    """Splits intervals, outer first, into as few parts as a greedy choice gives that nest."""
    everything = np.arange(len(start))
    if len(start) < 2 or bool(np.all(start[1:] >= np.maximum.accumulate(end)[:-1])):
        return [everything]
    part_of = np.zeros(len(start), dtype=np.int64)
    stacks: list[list[int]] = []
    starts, ends = start.tolist(), end.tolist()
    for number in range(len(starts)):
        begin, stop = starts[number], ends[number]
        for part, stack in enumerate(stacks):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or stop <= stack[-1]:
                stack.append(stop)
                part_of[number] = part
                break
        else:
            part_of[number] = len(stacks)
            stacks.append([stop])
    return [places for _, places in places_by_value(part_of)]


class Flows(NamedTuple):
    """The arrows that begin and end at one rank's events: row -> numbers of arrows."""

    begins: dict[int, list[int]]
    ends: dict[int, list[int]]


class FlowFinder:
    """Numbers the arrows of a trace, rank by rank."""

    def __init__(self, trace: Trace) -> None:
        self._numbers = 0
        self._sends: dict[tuple[Any, ...], int] = {}
        sends: dict[tuple[Any, ...], None] = {}
        receives: set[tuple[Any, ...]] = set()
        for rank in trace.ranks:
            for key, op in _pairs(trace.events(rank), rank).values():
                if op == "send":
                    sends.setdefault(key)
                else:
                    receives.add(key)
        for key in sends:
            if key in receives:
                self._sends[key] = self._next()

    def of_rank(self, table: pa.Table, rank: int) -> Flows:
        """The arrows at one rank's events."""
        begins: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for row, (key, op) in _pairs(table, rank).items():
            if key in self._sends:
                (begins if op == "send" else ends)[row].append(self._sends[key])
        for gradient, message in _gradients(table):
            number = self._next()
            begins[gradient].append(number)
            ends[message].append(number)
        return Flows(begins, ends)

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


def _pairs(table: pa.Table, rank: int) -> dict[int, tuple[tuple[Any, ...], str]]:
    """Row -> what a send and its receive have in common, and which of the two it is."""
    op = table["op"].combine_chunks()
    wanted = pc.is_in(op.dictionary, value_set=pa.array(["send", "recv"])).to_pylist()
    codes = op.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(np.isin(codes, np.flatnonzero(wanted)))
    columns = table.select(["op", "group", "peer", "tag", "seq"]).take(pa.array(rows)).to_pydict()
    found = {}
    for place, row in enumerate(rows.tolist()):
        peer, seq = columns["peer"][place], columns["seq"][place]
        if peer is None or seq is None:
            continue
        name = columns["op"][place]
        pair = (rank, peer) if name == "send" else (peer, rank)
        found[row] = ((columns["group"][place], *pair, columns["tag"][place], seq), name)
    return found


def _gradients(table: pa.Table) -> list[tuple[int, int]]:
    """For each gradient the first message issued after it that carries the same tensor."""
    kinds = table["kind"].combine_chunks()
    names = kinds.dictionary.to_pylist()
    codes = kinds.indices.to_numpy()
    if "gradient" not in names or "message" not in names:
        return []
    gradients = _by_tensor(table, np.flatnonzero(codes == names.index("gradient")), "start_ns")
    messages = _by_tensor(table, np.flatnonzero(codes == names.index("message")), "enqueue_ns")
    found = []
    for tensor, (rows, times) in gradients.items():
        if tensor not in messages:
            continue
        message_rows, message_times = messages[tensor]
        place = np.searchsorted(message_times, times, side="left")
        following = np.append(times[1:], np.iinfo(np.int64).max)
        for row, index, until in zip(rows, place, following, strict=True):
            # A message after the next gradient of the tensor belongs to that gradient.
            if index < len(message_rows) and message_times[index] < until:
                found.append((int(row), int(message_rows[index])))
    return found


def _by_tensor(table: pa.Table, rows: Integers, time: str) -> dict[int, tuple[Integers, Integers]]:
    """Tensor id -> rows and their times, by time; ids that are null are left out."""
    part = table.take(pa.array(rows))
    lists = part["tensors"].combine_chunks()
    of_row = memory_of(pc.list_parent_indices(lists))
    ids = numbers_of(pc.list_flatten(lists), NULL)
    known = ids >= 0
    of_row, ids = of_row[known], ids[known]
    times = pc.coalesce(part[time], part["start_ns"]).to_numpy()[of_row]
    order = np.lexsort((times, ids))
    ids, times, flat_rows = ids[order], times[order], rows[of_row][order]
    borders = [*np.flatnonzero(np.diff(ids, prepend=-1)).tolist(), len(ids)]
    return {
        int(ids[first]): (flat_rows[first:last], times[first:last])
        for first, last in pairwise(borders)
    }


_COLUMNS: Final = (
    *("step", "phase", "op", "group", "seq", "peer", "tag", "bytes", "out_bytes", "wire_bytes"),
    *("dtype", "status", "clock", "seam", "shapes", "samples", "tokens", "flops"),
)
_MAX_TENSORS: Final = 64
BATCH: Final = 1 << 16


def details_of(table: pa.Table, tensors: Sequence[TensorInfo]) -> dict[str, pa.Array]:
    """The columns worth showing: name -> values, for those that are not null throughout.

    Args:
        table: Some events.
        tensors: The tensors that their ids refer to.
    """
    columns = {name: table[name].combine_chunks() for name in _COLUMNS}
    columns["tensors"] = _names(table["tensors"].combine_chunks(), tensors)
    return {name: column for name, column in columns.items() if column.null_count < len(column)}


def _names(lists: pa.Array, tensors: Sequence[TensorInfo]) -> pa.Array:
    """Text in place of each list of ids; null where it is empty."""
    names = {tensor.id: tensor.name for tensor in tensors}
    texts: list[str | None] = [None] * len(lists)
    filled = pc.fill_null(pc.greater(pc.list_value_length(lists), 0), False)
    for row in pc.indices_nonzero(filled).to_pylist():
        ids = lists[row].as_py()
        shown = [names.get(number, f"tensor {number}") for number in ids[:_MAX_TENSORS]]
        more = len(ids) - len(shown)
        texts[row] = ", ".join(shown) + (f" and {more} more" if more else "")
    return pa.array(texts, pa.string()).dictionary_encode()
