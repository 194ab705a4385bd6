"""Arrows between events: from a send to its receive, from a gradient to its message."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import NULL, memory_of, numbers_of

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

Integers = npt.NDArray[np.int64]


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
