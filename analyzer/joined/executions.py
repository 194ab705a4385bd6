"""Every execution of a kernel, a copy or an operator, as columns over all ranks.

The *self* time of an operator is its time on its thread without nested operators and runtime calls;
its *device* time is the time of the kernels and copies launched in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    Columns,
    ColumnTable,
    IntArray,
    by_place,
    distinct,
    named,
)
from ddltrace.analyzer.events.launches import (
    is_python_call,
    is_runtime_call,
    launches_of,
)

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

DEVICE_KINDS: Final = ("compute", "communication", "copy")
HOST_KINDS: Final = ("operator", "runtime")
KINDS: Final = (*DEVICE_KINDS, *HOST_KINDS)
_STREAM: Final = "stream-"
_MAX_DEPTH: Final = 1 << 10


@dataclass(frozen=True)
class Executions(ColumnTable):
    """One entry per run of an operation.

    Attributes:
        names: The names that occur.
        name: Index into `names`.
        kind: Index into `KINDS`.
        rank: Global rank.
        step: Number of the step; -1 outside of steps.
        duration: Nanoseconds.
        own: For operators and calls: the duration without nested operators and calls, nanoseconds.
        device: For operators and calls: the duration of device work launched in them, nanoseconds.
        own_device: The same without device work launched by a nested operator.
        shapes: The shapes of inputs that occur.
        shape: Index into `shapes`: of an operator's inputs; of device work, of the inputs of the
            operator that launched it; -1 where they are not known.
    """

    names: list[str]
    name: IntArray
    kind: IntArray
    rank: IntArray
    step: IntArray
    duration: IntArray
    own: IntArray
    device: IntArray
    own_device: IntArray
    shapes: list[str]
    shape: IntArray

    def of_kinds(self, kinds: tuple[str, ...]) -> IntArray:
        """Entries of some kinds."""
        return np.flatnonzero(np.isin(self.kind, [KINDS.index(kind) for kind in kinds]))


def no_executions() -> Executions:
    """Of no operation."""
    none = np.empty(0, dtype=np.int64)
    return Executions([], none, none, none, none, none, none, none, none, [], none)


class _Vocabulary:
    """Codes of the words of several tables."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def recoded(self, codes: IntArray, words: Sequence[str]) -> IntArray:
        """Codes of one table as codes of all."""
        mapping = [self._codes.setdefault(word, len(self._codes)) for word in words]
        return np.array([*mapping, NULL], dtype=np.int64)[codes]

    def words(self) -> list[str]:
        """All words by their codes."""
        return list(self._codes)


def find_executions(trace: Trace, steps: IntArray | None = None) -> Executions:
    """Collects the operations of all ranks.

    Args:
        trace: The trace; only traces with single operators (level ``op``) have any.
        steps: Numbers of the steps wanted; by default everything.
    """
    names, shapes = _Vocabulary(), _Vocabulary()
    parts = [no_executions()]
    task = partial(_of_rank, steps=steps)
    doing = "collecting operations"
    of_ranks = () if trace.run.level != "op" else trace.map_ranks(task, doing, one_at_a_time=True)
    for found in of_ranks:
        name = names.recoded(found.name, found.names)
        shape = shapes.recoded(found.shape, found.shapes)
        parts.append(replace(found, name=name, shape=shape))
    return replace(Executions.joined(parts), names=names.words(), shapes=shapes.words())


def device_rows(columns: Columns) -> IntArray:
    """Rows of kernels, copies and communication kernels that have ended."""
    on_stream = np.array([*(lane.startswith(_STREAM) for lane in columns.lanes), False])
    message = (columns.kind == KIND["message"]) & on_stream[columns.lane]
    work = message | np.isin(columns.kind, [KIND["kernel"], KIND["copy"]])
    return np.flatnonzero(work & (columns.end != NULL_NS))


def _of_rank(trace: Trace, steps: IntArray | None) -> Executions:
    """The operations of a trace of one rank; see `find_executions`."""
    (rank,) = trace.ranks
    names, shapes = _Vocabulary(), _Vocabulary()
    parts = [no_executions()]
    for table in trace.event_tables(rank):
        columns = Columns(table)
        found = _of_events(columns)
        rows = found.pop("row")
        found["name"] = names.recoded(columns.name[rows], columns.names)
        found["shape"] = shapes.recoded(found["shape"], columns.codes("shapes")[1])
        found["rank"] = np.full(len(rows), rank)
        found["step"] = columns.step[rows]
        kept = found["name"] != NULL
        if steps is not None:
            kept &= np.isin(found["step"], steps)
        some = {column: values[kept].astype(np.int64) for column, values in found.items()}
        parts.append(Executions(names=[], shapes=[], **some))
    return replace(Executions.joined(parts), names=names.words(), shapes=shapes.words())


def _of_events(columns: Columns) -> dict[str, IntArray]:
    work = device_rows(columns)
    kind = columns.kind[work]
    work_kind = np.where(kind == KIND["copy"], 2, np.where(kind == KIND["message"], 1, 0))
    called = named(columns, is_runtime_call)
    host = (columns.kind == KIND["host"]) & ~named(columns, is_python_call)
    host &= np.array([*("stream-" not in lane for lane in columns.lanes), True])[columns.lane]
    calls = np.flatnonzero(host & (columns.end != NULL_NS))
    duration = columns.end - columns.start
    parents, depth = _nesting(columns, calls)
    nested = parents != NULL
    own = duration[calls].copy()
    np.subtract.at(own, parents[nested], duration[calls[nested]])
    launched = np.zeros(len(columns), dtype=np.int64)
    launch = launches_of(columns)[work]
    np.add.at(launched, launch[launch != NULL], duration[work[launch != NULL]])
    of_calls = launched[calls]
    device = _with_inner(of_calls, parents, depth)
    # An operator's own device work is that of the runtime calls directly in it.
    own_device = of_calls.copy()
    direct = nested & called[calls]
    np.add.at(own_device, parents[direct], of_calls[direct])
    none = np.zeros(len(work), dtype=np.int64)
    shape = np.asarray(columns.codes("shapes")[0], dtype=np.int64)
    around = shape.copy()
    around[calls] = _from_outer(shape[calls], parents, depth)
    return {
        "row": np.concatenate([work, calls]),
        "kind": np.concatenate([work_kind, np.where(called[calls], 4, 3)]),
        "duration": np.concatenate([duration[work], duration[calls]]),
        "own": np.concatenate([duration[work], np.maximum(own, 0)]),
        "device": np.concatenate([none, device]),
        "own_device": np.concatenate([none, own_device]),
        "shape": np.concatenate([np.where(launch == NULL, NULL, around[launch]), shape[calls]]),
    }


def _from_outer(values: IntArray, parents: IntArray, depth: IntArray) -> IntArray:
    """Each entry's value, or that of the innermost entry around it that has one."""
    found: IntArray = np.array(values)
    for inner in by_place(depth, int(depth.max(initial=0)) + 1)[1:]:
        some = inner[(parents[inner] != NULL) & (found[inner] == NULL)]
        found[some] = found[parents[some]]
    return found


def _with_inner(values: IntArray, parents: IntArray, depth: IntArray) -> IntArray:
    """Each entry's value with those of all entries in it, the deepest first."""
    total: IntArray = np.array(values)
    for inner in by_place(depth, int(depth.max(initial=0)) + 1)[:0:-1]:
        some = inner[parents[inner] != NULL]
        np.add.at(total, parents[some], total[some])
    return total


def _nesting(columns: Columns, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Of some intervals the place of the one right around each in its lane, and the depth.

    Intervals of a lane nest, so an interval is as deep as those before it in its lane that have
    not ended; the one around it is the last before it that is one less deep.

    Returns:
        The places, -1 for none; and how many intervals are around each, at most `_MAX_DEPTH`.
    """
    lane, start, end = columns.lane[rows].astype(np.int64), columns.start[rows], columns.end[rows]
    order = np.lexsort((-end, start, lane))
    lane, start, end = lane[order], start[order], end[order]
    first = np.searchsorted(lane, lane, side="left")
    depth = np.zeros(len(rows), dtype=np.int64)
    for begin in distinct(first).tolist():
        until = int(np.searchsorted(lane, lane[begin], side="right"))
        ended = np.searchsorted(np.sort(end[begin:until]), start[begin:until], side="right")
        depth[begin:until] = np.maximum(np.arange(until - begin) - ended, 0)
    depth = np.minimum(depth, _MAX_DEPTH)
    parent = np.full(len(rows), NULL, dtype=np.int64)
    for outer, inner in pairwise(by_place(depth, int(depth.max(initial=0)) + 1)):
        place = np.searchsorted(outer, inner) - 1
        around = outer[np.maximum(place, 0)] if len(outer) else np.zeros(len(inner), np.int64)
        holds = (place >= 0) & (lane[around] == lane[inner]) & (end[around] >= end[inner])
        parent[order[inner[holds]]] = order[around[holds]]
    unsorted = np.empty_like(depth)
    unsorted[order] = depth
    return parent, unsorted
