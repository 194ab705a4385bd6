"""Tables of kernels and operators: number of executions, durations and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import ColumnTable, IntArray, changes
from ddltrace.analyzer.formatting.text_table import kernel_text
from ddltrace.analyzer.joined.executions import DEVICE_KINDS, HOST_KINDS, KINDS, Executions
from ddltrace.analyzer.measures.keyed_sums import RowSums
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Table, derived
from ddltrace.analyzer.measures.rank_measures import measure_ranks
from ddltrace.analyzer.measures.steps import Steps

Floats = npt.NDArray[np.float64]
_P95: Final = 0.95
MAX_SHAPES: Final = 16


@dataclass(frozen=True)
class OperationOfShapes:
    """The runs of a kernel or operator on inputs of the same shapes.

    Attributes:
        shapes: Shapes such as ``[[64,3],[3]]``: one list for each input, empty for an input that is
            not a tensor. For a kernel, the inputs of the operator that launched it.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
    """

    shapes: str
    count: int
    total_us: float
    mean_us: float


@dataclass(frozen=True)
class OperationOfRank:
    """One rank's part of a kernel or operator.

    Attributes:
        rank: Global rank.
        count: Number of executions on the rank.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
    """

    rank: int
    count: int
    total_us: float
    mean_us: float
    p95_us: float


@dataclass(frozen=True)
class KernelRow:
    """One kernel, communication kernel or kind of copy, over all ranks.

    Attributes:
        name: Its name.
        kind: ``compute``, ``communication`` or ``copy``.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        min_us: Shortest duration.
        max_us: Longest duration.
        share: Its part of the durations of all kernels and copies.
        per_step_us: Its time in one step of one rank, mean; None without steps.
        ranks: Its runs by rank.
        shapes: Its runs by the shapes of inputs, the longest total first, at most 16; empty where
            no shapes are known.
    """

    name: str
    kind: str
    count: int
    total_us: float
    mean_us: float
    p95_us: float
    min_us: float
    max_us: float
    share: float
    per_step_us: float | None
    ranks: tuple[OperationOfRank, ...]
    shapes: tuple[OperationOfShapes, ...] = ()


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or one call of the device's runtime, over all ranks.

    Attributes:
        name: Its name.
        kind: ``operator`` or ``runtime``.
        count: How often it ran.
        total_us: Sum of its durations.
        self_us: The same without nested operators and runtime calls.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        device_us: Durations of the kernels and copies launched in it.
        self_device_us: The same without those launched by another operator in it.
        per_step_us: Its time in one step of one rank, mean; None without steps.
        ranks: Its runs by rank.
        shapes: As in `KernelRow`.
    """

    name: str
    kind: str
    count: int
    total_us: float
    self_us: float
    mean_us: float
    p95_us: float
    device_us: float
    self_device_us: float
    per_step_us: float | None
    ranks: tuple[OperationOfRank, ...]
    shapes: tuple[OperationOfShapes, ...] = ()


@dataclass(frozen=True)
class Groups(ColumnTable):
    """Durations summarized by equal keys, ascending by key.

    Attributes:
        first: For each group one of its entries.
        of_entry: For each entry its group.
        count: Entries.
        total: Sum of the durations, ns.
        p95: 95th percentile, ns, between two durations linearly.
        low: Shortest, ns.
        high: Longest, ns.
    """

    first: IntArray
    of_entry: IntArray
    count: IntArray
    total: IntArray
    p95: Floats
    low: IntArray
    high: IntArray


def grouped(keys: Sequence[IntArray], duration: IntArray) -> Groups:
    """Summarizes durations by equal keys; the last key is the first to be sorted by."""
    order = np.lexsort((duration, *keys))
    differs = changes(*(key[order] for key in keys))
    begin = np.flatnonzero(differs)
    count = np.diff(np.append(begin, len(order)))
    ordered = duration[order]
    of_entry = np.empty(len(order), dtype=np.int64)
    of_entry[order] = np.cumsum(differs) - 1
    place = begin + _P95 * (count - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, begin + count - 1)
    p95 = ordered[below] + (place - below) * (ordered[above] - ordered[below])
    total = np.add.reduceat(ordered, begin) if len(begin) else begin
    last = begin + count - 1
    return Groups(order[begin], of_entry, count, total, p95, ordered[begin], ordered[last])


def kernel_rows(found: Executions, rank_steps: int) -> tuple[KernelRow, ...]:
    """One row per kernel, communication kernel or kind of copy, the longest total first.

    Args:
        found: All operations.
        rank_steps: Steps of all ranks together; 0 if there are none.
    """
    rows = found.of_kinds(DEVICE_KINDS)
    by_name = grouped([found.name[rows], found.kind[rows]], found.duration[rows])
    whole = max(int(by_name.total.sum()), 1)
    values = _shared_values(found, rows, by_name, rank_steps)
    return tuple(
        KernelRow(
            min_us=float(by_name.low[group]) / 1e3,
            max_us=float(by_name.high[group]) / 1e3,
            share=float(by_name.total[group]) / whole,
            **values[group],
        )
        for group in np.argsort(-by_name.total, kind="stable").tolist()
    )


def operator_rows(found: Executions, rank_steps: int) -> tuple[OperatorRow, ...]:
    """One row per operator or runtime call, the longest self time first.

    Args:
        found: All operations.
        rank_steps: Steps of all ranks together; 0 if there are none.
    """
    rows = found.of_kinds(HOST_KINDS)
    by_name = grouped([found.name[rows], found.kind[rows]], found.duration[rows])

    def sums(values: IntArray) -> Floats:
        return np.bincount(by_name.of_entry, values[rows], len(by_name)) / 1e3

    own, device, own_device = map(sums, (found.own, found.device, found.own_device))
    values = _shared_values(found, rows, by_name, rank_steps)
    return tuple(
        OperatorRow(
            self_us=float(own[group]),
            device_us=float(device[group]),
            self_device_us=float(own_device[group]),
            **values[group],
        )
        for group in np.argsort(-own, kind="stable").tolist()
    )


def _shared_values(
    found: Executions, rows: IntArray, by_name: Groups, rank_steps: int
) -> list[dict[str, Any]]:
    """Returns, for each group, the values that `KernelRow` and `OperatorRow` have in common."""
    in_steps = _in_steps(found, rows, by_name, rank_steps)
    of_ranks = _of_ranks(found, rows, by_name)
    of_shapes = _of_shapes(found, rows, by_name)
    return [
        {
            "name": found.names[int(found.name[rows[first]])],
            "kind": KINDS[int(found.kind[rows[first]])],
            "count": count,
            "total_us": total / 1e3,
            "mean_us": total / count / 1e3,
            "p95_us": p95 / 1e3,
            "per_step_us": in_steps[group],
            "ranks": of_ranks[group],
            "shapes": of_shapes[group],
        }
        for group, (first, count, total, p95) in enumerate(
            zip(
                by_name.first.tolist(),
                by_name.count.tolist(),
                by_name.total.astype(float).tolist(),
                by_name.p95.tolist(),
                strict=True,
            )
        )
    ]


def _in_steps(
    found: Executions, rows: IntArray, by_name: Groups, rank_steps: int
) -> list[float | None]:
    """Of each group the microseconds in one step of one rank."""
    if not rank_steps:
        return [None] * len(by_name)
    inside = found.step[rows] >= 0
    sums = np.bincount(by_name.of_entry[inside], found.duration[rows][inside], len(by_name))
    values: list[float | None] = (sums / 1e3 / rank_steps).tolist()
    return values


def _of_ranks(
    found: Executions, rows: IntArray, by_name: Groups
) -> list[tuple[OperationOfRank, ...]]:
    parts = grouped([found.rank[rows], by_name.of_entry], found.duration[rows])
    lists: list[list[OperationOfRank]] = [[] for _ in range(len(by_name))]
    for part, entry in enumerate(parts.first.tolist()):
        lists[by_name.of_entry[entry]].append(
            OperationOfRank(
                rank=int(found.rank[rows[entry]]),
                count=int(parts.count[part]),
                total_us=float(parts.total[part]) / 1e3,
                mean_us=float(parts.total[part] / parts.count[part]) / 1e3,
                p95_us=float(parts.p95[part]) / 1e3,
            )
        )
    return [tuple(rows) for rows in lists]


def _of_shapes(
    found: Executions, rows: IntArray, by_name: Groups
) -> list[tuple[OperationOfShapes, ...]]:
    known = np.flatnonzero(found.shape[rows] >= 0)
    parts = grouped(
        [found.shape[rows[known]], by_name.of_entry[known]], found.duration[rows[known]]
    )
    lists: list[list[OperationOfShapes]] = [[] for _ in range(len(by_name))]
    for part in np.argsort(-parts.total, kind="stable").tolist():
        entry = int(known[parts.first[part]])
        mine = lists[by_name.of_entry[entry]]
        if len(mine) < MAX_SHAPES:
            mine.append(
                OperationOfShapes(
                    shapes=found.shapes[int(found.shape[rows[entry]])],
                    count=int(parts.count[part]),
                    total_us=float(parts.total[part]) / 1e3,
                    mean_us=float(parts.total[part] / parts.count[part]) / 1e3,
                )
            )
    return [tuple(rows) for rows in lists]


class Operations(NamedTuple):
    """Kernels and operators of steps.

    Attributes:
        kernels: Kernels and copies by name.
        operators: Operators and runtime calls by name.
        rank_steps: Steps of all ranks together; 0 if there are none.
    """

    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    rank_steps: int


def _operations(joined: JoinedSteps) -> Operations:
    rank_steps = len(joined.once(measure_ranks).steps["step"]) if len(joined.steps) else 0
    found = joined.executions
    return Operations(kernel_rows(found, rank_steps), operator_rows(found, rank_steps), rank_steps)


class _OperationSums:
    """Merges the rows of ranges of steps: a 95th percentile is the mean of those of the ranges."""

    def __init__(self) -> None:
        self._kernels: RowSums[KernelRow] = RowSums("name", "kind")
        self._operators: RowSums[OperatorRow] = RowSums("name", "kind")
        self._ranks: RowSums[OperationOfRank] = RowSums("rank")
        self._shapes: RowSums[OperationOfShapes] = RowSums("shapes")
        self._extremes: dict[tuple[str, str], tuple[float, float]] = {}
        self._rank_steps = 0

    def add(self, part: Operations, steps: Steps) -> None:
        """Adds the operations of a range."""
        self._rank_steps += part.rank_steps
        self._kernels.add([_weighted(row, row.count, part.rank_steps) for row in part.kernels])
        self._operators.add([_weighted(row, row.count, part.rank_steps) for row in part.operators])
        rows: tuple[KernelRow | OperatorRow, ...] = (*part.kernels, *part.operators)
        for row in rows:
            key = row.name, row.kind
            self._ranks.add([_weighted(each, each.count) for each in row.ranks], of=key)
            self._shapes.add(row.shapes, of=key)
        for kernel in part.kernels:
            key = kernel.name, kernel.kind
            low, high = self._extremes.get(key, (kernel.min_us, kernel.max_us))
            self._extremes[key] = (min(low, kernel.min_us), max(high, kernel.max_us))

    def result(self) -> Operations:
        """The operations of all ranges."""
        ranks, shapes = self._ranks.by(), self._shapes.by()

        def finished(row: _RowT) -> _RowT:
            """A row with means in place of sums."""
            key = row.name, row.kind
            by_shapes = sorted(shapes.get(key, ()), key=lambda each: -each.total_us)
            return replace(
                _weighted(row, 1 / row.count, 1 / self._rank_steps if self._rank_steps else None),
                ranks=tuple(
                    _weighted(each, 1 / each.count)
                    for each in sorted(ranks.get(key, ()), key=lambda each: each.rank)
                ),
                shapes=tuple(
                    replace(each, mean_us=each.total_us / each.count)
                    for each in by_shapes[:MAX_SHAPES]
                ),
            )

        kernels = sorted(map(finished, self._kernels.rows()), key=lambda row: -row.total_us)
        whole = sum(row.total_us for row in kernels) or 1.0
        extremes = [self._extremes[row.name, row.kind] for row in kernels]
        return Operations(
            tuple(
                replace(row, share=row.total_us / whole, min_us=low, max_us=high)
                for row, (low, high) in zip(kernels, extremes, strict=True)
            ),
            tuple(sorted(map(finished, self._operators.rows()), key=lambda row: -row.self_us)),
            self._rank_steps,
        )


_RowT = TypeVar("_RowT", KernelRow, OperatorRow)
_PartT = TypeVar("_PartT", KernelRow, OperatorRow, OperationOfRank)


def _weighted(row: _PartT, weight: float, rank_steps: float | None = None) -> _PartT:
    """A row whose percentile and time in a step are multiplied, and whose mean is that of its sums.

    Args:
        weight: A factor for the percentile.
        rank_steps: A factor for the time in one step of one rank; None without steps.
    """
    changes: dict[str, Any] = {"mean_us": row.total_us / row.count}
    if not isinstance(row, OperationOfRank):
        in_step = row.per_step_us
        changes["per_step_us"] = None if rank_steps is None else (in_step or 0.0) * rank_steps
    return replace(row, p95_us=row.p95_us * weight, **changes)


_NAME: Final = 30

KERNELS: Final[Measure[Operations, tuple[KernelRow, ...]]] = Measure(
    "kernels",
    lambda whole: whole.found.of(KERNELS).kernels,
    _operations,
    _OperationSums,
    table=Table[KernelRow](
        "Kernels and copies (all ranks; a step: of one rank, mean)",
        {
            "kernel": lambda row: kernel_text(row.name, _NAME),
            "kind": "kind",
            "count": "count",
            "total": "total_us",
            "mean": "mean_us",
            "p95": "p95_us",
            "a step": "per_step_us",
            "share": "share",
        },
    ),
)
OPERATORS: Final = derived(
    "operators",
    lambda whole: whole.found.of(KERNELS).operators,
    table=Table[OperatorRow](
        "Operators and runtime calls by self time (all ranks)",
        {
            "operator": lambda row: kernel_text(row.name, _NAME),
            "count": "count",
            "self": "self_us",
            "total": "total_us",
            "mean": "mean_us",
            "p95": "p95_us",
            "a step": "per_step_us",
            "launched work": "self_device_us",
        },
    ),
)
