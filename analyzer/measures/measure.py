"""What a measure is, and what it is computed from.

A measure is one module of this folder: the record of its rows, and a `Measure` that says how it is
computed in steps, how the measures of several ranges of steps are merged, and what the analysis
holds of it. Its field in `ddltrace.analyzer.model.Analysis` registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

import numpy as np

from ddltrace.analyzer.events.event_columns import BoolArray, FloatArray, IntArray
from ddltrace.analyzer.events.own_work import OwnWork, own_work
from ddltrace.analyzer.events.rank_scan import RankBlocks, RankScan
from ddltrace.analyzer.joined.critical_path import Path, PathFinder, Window
from ddltrace.analyzer.joined.dependencies import Graph, find_graph
from ddltrace.analyzer.joined.executions import Executions, find_executions
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.trace_scans import describe_ranks
from ddltrace.analyzer.measures.steps import Steps, in_steps

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection

FoundT_co = TypeVar("FoundT_co", covariant=True)
MergedT = TypeVar("MergedT")
ValueT = TypeVar("ValueT")
RowT = TypeVar("RowT")
T = TypeVar("T")

MAX_PERIODS = 64
_CLOCK_ERROR_NS = 200_000
"""In the public traces of StragglerAnalysis, computations start up to 0.13 ms before the end of the
receive that they depend on."""


@dataclass(frozen=True)
class JoinedSteps:
    """Steps of a trace whose messages are joined: what a measure is computed from.

    Attributes:
        trace: The trace.
        scans: Rank -> its scan.
        joined: All messages.
        steps: The steps; without any, the whole trace is measured.
        selected: Whether only the steps count, and not what lies outside of them.
        origin_ns: Where the trace begins, ns on rank 0's clock.
        dependencies_known: See `SavingsFinder`.
        in_ranges: Whether these are one of several ranges of steps, whose measures are merged: what
            grows with the number of messages is rounded then.
        most_periods: Periods into which the course of tensors is divided.
        continues: Whether the steps before these are measured as well, in another range.
        at_end: Whether these are the last steps of the trace.
    """

    trace: Trace
    scans: Mapping[int, RankScan]
    joined: Joined
    steps: Steps
    selected: bool
    origin_ns: int
    dependencies_known: bool
    in_ranges: bool = False
    most_periods: int = MAX_PERIODS
    continues: bool = False
    at_end: bool = True
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, find: Callable[[JoinedSteps], T]) -> T:
        """What a function finds in these steps; it is called once for all measures."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast("T", self._found[find])

    @property
    def steady(self) -> IntArray:
        """Numbers of the steady steps."""
        return self.steps.number[self.steps.steady]

    @property
    def wanted(self) -> IntArray | None:
        """Numbers of the steps if only these count; None for everything."""
        return self.steps.number if self.selected else None

    @cached_property
    def chosen_collectives(self) -> BoolArray:
        """Which collectives are in the analyzed window."""
        return self._counted(self.joined.collectives.step)

    @cached_property
    def chosen_messages(self) -> BoolArray:
        """Which messages are in the analyzed window."""
        return self._counted(self.joined.messages.step)

    def _counted(self, step: IntArray) -> BoolArray:
        return in_steps(step, self.steps.number) if self.selected else np.ones(len(step), bool)

    @cached_property
    def graph(self) -> Graph:
        """The dependencies between ranks."""
        tolerance = _CLOCK_ERROR_NS if self.dependencies_known else 0
        return find_graph(self.scans, self.joined, tolerance_ns=tolerance)

    @cached_property
    def work(self) -> dict[int, OwnWork]:
        """Rank -> its own work."""
        return {rank: own_work(scan) for rank, scan in self.scans.items()}

    @cached_property
    def executions(self) -> Executions:
        """Every run of a kernel, a copy or an operator."""
        return find_executions(self.trace, self.wanted)

    @cached_property
    def paths(self) -> dict[int, Path]:
        """Step -> its critical path."""

        return find_paths(self.trace, self.scans, self.joined, self.steps)

    @property
    def steady_paths(self) -> list[Path]:
        """The critical paths of the steady steps."""
        return [self.paths[number] for number in self.steady.tolist()]


def find_paths(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, steps: Steps
) -> dict[int, Path]:
    """The critical path of every step: step number -> path."""

    @cache
    def blocks(rank: int) -> RankBlocks:
        return scans[rank].path_blocks()

    names = cache(trace.tensor_names)
    finder = PathFinder(joined, blocks, partial(describe_ranks, trace, scans), names)
    bounds = (steps.start.tolist(), steps.end.tolist(), steps.last_rank.tolist())
    windows = [Window(*bound) for bound in zip(*bounds, strict=True)]
    return dict(zip(steps.number.tolist(), finder.find(windows), strict=True))


@dataclass(frozen=True)
class Found:
    """What all measures found in steps.

    Attributes:
        steps: The steps.
        messages: Messages of all ranks in each step.
        bytes: Their bytes.
        parts: Name of a measure -> what it found.
    """

    steps: Steps
    messages: IntArray
    bytes: IntArray
    parts: dict[str, Any]

    def of(self, measure: Measure[FoundT_co, Any]) -> FoundT_co:
        """What a measure found."""
        return cast("FoundT_co", self.parts[measure.name])


@dataclass(frozen=True)
class Whole:
    """All steps of an analysis: what the values of measures are made of.

    Attributes:
        trace: The trace.
        selection: Of a trace that was not read as a whole, the steps that were.
        found: What all measures found.
        rank_steps: Measures of every rank in each step.
        window: Which of them are of steady steps; all without steps.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """

    trace: Trace
    selection: StepSelection | None
    found: Found
    rank_steps: dict[str, FloatArray]
    window: BoolArray
    residual_ns: float | None

    @property
    def steps(self) -> Steps:
        """The steps."""
        return self.found.steps


class Merger(Protocol[MergedT]):
    """Merges what a measure found in ranges of steps, which are added in any order."""

    def add(self, found: MergedT, steps: Steps) -> None:
        """Adds what was found in a range of steps."""

    def result(self) -> MergedT:
        """What was found in all of them."""


class _Fold(Generic[MergedT]):
    def __init__(self, both: Callable[[MergedT, MergedT], MergedT]) -> None:
        self._both = both
        self._found: list[MergedT] = []

    def add(self, found: MergedT, steps: Steps) -> None:
        self._found = [self._both(former, found) for former in self._found] or [found]

    def result(self) -> MergedT:
        return self._found[0]


def merged_by(both: Callable[[MergedT, MergedT], MergedT]) -> Callable[[], Merger[MergedT]]:
    """A merger that calls a function with what was found in two ranges, one after the other."""
    return lambda: _Fold(both)


class _Collected(Generic[MergedT]):
    def __init__(self, of_all: Callable[[Sequence[tuple[float, MergedT]]], MergedT]) -> None:
        self._of_all = of_all
        self._found: list[tuple[float, MergedT]] = []

    def add(self, found: MergedT, steps: Steps) -> None:
        self._found.append((float(len(steps)), found))

    def result(self) -> MergedT:
        return self._of_all(self._found)


def merged_together(
    of_all: Callable[[Sequence[tuple[float, MergedT]]], MergedT],
) -> Callable[[], Merger[MergedT]]:
    """A merger that calls a function once, with how many steps each range has and what it found."""
    return lambda: _Collected(of_all)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """How a report shows the rows of a measure.

    Attributes:
        title: The heading.
        columns: As `ddltrace.analyzer.formatting.terminal.Columns`.
        most: Rows that the text report shows.
        order: Sorts the rows, the largest first; by default they keep their order.
    """

    title: str
    columns: Mapping[str, str | Callable[[RowT], str]]
    most: int = 8
    order: Callable[[RowT], float] | None = None

    def first(self, rows: Sequence[RowT]) -> Sequence[RowT]:
        """The rows that the text report shows."""
        if self.order is not None:
            rows = sorted(rows, key=self.order, reverse=True)
        return rows[: self.most]


@dataclass(frozen=True)
class Measure(Generic[FoundT_co, ValueT]):
    """One measure.

    Attributes:
        name: Its key in ``analyze --json``.
        value: What the analysis holds of it.
        compute: What is found in steps; None for a value that is made of other measures.
        merge: Makes what merges the measures of ranges of steps.
        of: The ranges that count: ``steady`` ones, those with ``steps``, or ``all``.
        rows: The record of its rows, if SQL has a table of them.
        table: How the text report shows its rows; None where that has a form of its own.
    """

    name: str
    value: Callable[[Whole], ValueT]
    compute: Callable[[JoinedSteps], FoundT_co] | None = None
    merge: Callable[[], Merger[FoundT_co]] | None = None
    of: Literal["steady", "steps", "all"] = "steps"
    rows: type | None = None
    table: Table[Any] | None = None


def derived(
    name: str,
    value: Callable[[Whole], ValueT],
    *,
    rows: type | None = None,
    table: Table[Any] | None = None,
) -> Measure[None, ValueT]:
    """A measure whose value is made of those of others; arguments as in `Measure`."""
    return Measure(name, value, rows=rows, table=table)


def measured(measure: Measure[Any, ValueT], *, shown: bool = True) -> ValueT:
    """The field of a measure in `ddltrace.analyzer.model.Analysis`.

    Args:
        shown: Whether it is part of ``analyze --json``.
    """
    made = field(metadata={"measure": measure}, repr=shown, compare=shown)
    return cast("ValueT", made)
