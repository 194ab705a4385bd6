"""Two jobs side by side, of one or several runs each: where the time went, and what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.compare.mean_difference import (
    LEVEL,
    MIN_STEPS,
    RunValues,
    difference_interval,
)
from ddltrace.analyzer.compare.run_noise import RunNoise, noise_between
from ddltrace.analyzer.compare.work_difference import (
    OperationChange,
    WorkDifference,
    changes_section,
    operation_changes,
    work_difference,
)
from ddltrace.analyzer.events.event_columns import places_by_value
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.formatting.terminal import Paragraph, Section, TextTable, layout
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text, time_text
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.measures.summary import OVERLAPPING
from ddltrace.analyzer.model import Analysis

SCHEMA: Final = "ddltrace.comparison/1"
RANK_STEP: Final = "step on one rank"
"""Name of `Comparison.rank_step_us`."""
_MAX_ROWS: Final = 10


_SAME: Final = 0.1
"""Differences of this share of the step have to be ruled out for two sides to be the same."""

Runs = Sequence[Analysis]


@dataclass(frozen=True)
class Difference:
    """One number of both sides, over their steady steps.

    Attributes:
        name: Name of the number.
        before: Mean over the runs of the first side; None if a trace does not contain it.
        after: Mean over those of the second.
        change: after - before.
        low: Lower end of the interval of `change`, at least -before; None with too few steps.
        high: Upper end; of a share at most 1 - before.
        verdict: ``less`` or ``more`` if zero lies outside the interval; ``same`` if it lies inside
            and the interval excludes a difference of 10 % of the step; else ``unknown``. One run a
            side is never ``same``.
    """

    name: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Two sides compared, each of one or several runs.

    Attributes:
        before: Name of the first side's first trace.
        after: Name of the second side's first trace.
        level: Confidence level of the intervals.
        before_runs: Names of all traces of the first side.
        after_runs: Those of the second.
        noise: What equal runs are known to differ by; no interval is narrower.
        undecided: What would decide about the step; None if it is decided.
        step_us: Wall time of a step.
        rank_step_us: Duration of a step on one rank, mean over ranks. Where it is over 5 % less
            than `step_us`, ranks begin a step while others are in the one before: then it decides
            which side is faster.
        shares: Overlap ratio and shares of the step, by the names of the summary.
        critical_path: Microseconds a step by category.
        ranks: Microseconds a step and rank that all runs have: its own step time.
        tensors: Exposed microseconds a step and rank of each tensor that all runs have, its
            interval over periods of several steps where a run has more than 64.
        work: Whether the first run of each side runs the same kernels and operators; read this
            first.
        kernels: Kernels and copies that differ there, the largest change of time first.
        operators: Operators and runtime calls that differ, the largest change first.
    """

    before: str
    after: str
    level: float
    before_runs: tuple[str, ...]
    after_runs: tuple[str, ...]
    noise: RunNoise
    undecided: str | None
    step_us: Difference
    rank_step_us: Difference
    shares: tuple[Difference, ...]
    critical_path: tuple[Difference, ...]
    ranks: tuple[Difference, ...]
    tensors: tuple[Difference, ...]
    work: WorkDifference
    kernels: tuple[OperationChange, ...]
    operators: tuple[OperationChange, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that ``ddltrace compare --json`` prints."""
        return {"schema": SCHEMA} | asdict(self)


def compare(before: Runs, after: Runs) -> Comparison:
    """Compares the runs of two sides, each over its own steady steps."""
    sides = _Sides(before, after)
    work, kernels, operators = compare_work(before[0], after[0])
    step, rank_step = sides.step(), sides.rank_step()
    return Comparison(
        before=before[0].trace.name,
        after=after[0].trace.name,
        level=LEVEL,
        before_runs=tuple(run.trace.name for run in before),
        after_runs=tuple(run.trace.name for run in after),
        noise=sides.noise,
        undecided=what_decides(_decisive(step, rank_step), before, after),
        step_us=step,
        rank_step_us=rank_step,
        shares=sides.shares(),
        critical_path=sides.parts(),
        ranks=sides.ranks(),
        tensors=sides.tensors(),
        work=work,
        kernels=kernels,
        operators=operators,
    )


def what_decides(step: Difference, before: Runs, after: Runs) -> str | None:
    """What would decide whether steps differ; None if it is decided."""
    if step.verdict != "unknown":
        return None
    if len(before) == len(after) == 1:
        if step.low is None:
            return f"too few steps: each trace needs {MIN_STEPS} steady steps"
        noise = noise_between([*before, *after], several=False)
        return (
            f"runs of the same job on {noise.article} machine differ by up to "
            f"{share_text(noise.step)}. Trace each job at least three times, in turns, and give "
            "all runs: ddltrace compare A1 A2 A3 --with B1 B2 B3"
        )
    if step.change is None:
        return "a run has no completed steps"
    return "the runs of a side differ too much among themselves. Trace more runs, in turns"


def compare_work(
    before: Analysis, after: Analysis
) -> tuple[WorkDifference, tuple[OperationChange, ...], tuple[OperationChange, ...]]:
    """Whether two traces run the same work, and which kernels and operators differ."""
    parts = _rank_steps(before), _rank_steps(after)
    kernels = operation_changes(before.kernels, after.kernels, parts)
    operators = operation_changes(before.operators, after.operators, parts)
    return work_difference(before, after, kernels, operators), kernels, operators


def _rank_steps(side: Analysis) -> int:
    """Steps of all ranks together; ranks, where there are no steps."""
    columns = side.rank_steps
    return max(len(columns["step"]), 1) if columns else max(len(side.trace.ranks), 1)


def compare_steps(before: Runs, after: Runs) -> Difference:
    """Compares the steady steps of two sides, microseconds.

    Returns:
        What decides which side is faster, as in `Comparison.rank_step_us`.
    """
    sides = _Sides(before, after)
    return _decisive(sides.step(), sides.rank_step())


def _decisive(step: Difference, rank_step: Difference) -> Difference:
    """The times that say how fast both sides are, of wall times and durations on one rank."""
    sides = ((step.before, rank_step.before), (step.after, rank_step.after))
    overlap = any(wall and own and own < (1 - OVERLAPPING) * wall for wall, own in sides)
    return rank_step if overlap else step


def compare_shares(before: Runs, after: Runs) -> tuple[Difference, ...]:
    """Compares the overlap ratio and the shares of the steady steps, by the summary's names."""
    return _Sides(before, after).shares()


def render_comparison(comparison: Comparison, width: int = 100, *, colors: bool = False) -> str:
    """Returns the comparison for a terminal.

    Args:
        comparison: What was compared.
        width: Columns that a line may take.
        colors: Whether to color it.
    """
    head = (
        f"{_names(comparison.before_runs)} -> {_names(comparison.after_runs)}: "
        f"{_sentence(comparison)}"
    )
    # What runs are known to differ by says nothing about a small part of the step.
    several = max(len(comparison.before_runs), len(comparison.after_runs)) > 1
    interval = [f"{comparison.level:.0%} interval"] if several else []
    header = ["", "before", "after", "change", *interval, ""]
    times = [comparison.step_us, comparison.rank_step_us, *comparison.critical_path]
    sections: list[Section] = [
        [Paragraph(comparison.work.sentence), Paragraph(head)],
        changes_section("Kernels and copies", comparison.kernels),
        changes_section("Operators and runtime calls", comparison.operators),
        [
            "A step, and on its critical path (mean over steady steps; ?: perhaps noise)",
            TextTable(header, [_cells(row, time_text, several) for row in times if _some(row)]),
        ],
        [
            "On a rank (mean): overlap ratio, and shares of a step",
            TextTable(header, [_cells(row, share_text, several) for row in comparison.shares]),
        ],
    ]
    for title, rows in (
        ("Step time by rank", comparison.ranks),
        ("Exposed communication by tensor", comparison.tensors),
    ):
        shown = sorted(rows, key=lambda row: -abs(row.change or 0.0))[:_MAX_ROWS]
        if shown:
            cells = [_cells(row, time_text, several) for row in shown]
            sections.append([f"{title} (largest changes)", TextTable(header, cells)])
    return layout(sections, width, colors=colors)


def _sentence(comparison: Comparison) -> str:
    step = _decisive(comparison.step_us, comparison.rank_step_us)
    if step.change is None or not step.before or not step.after:
        return "a step cannot be compared: a run has no completed steps."
    sizes = f"{time_text(step.before)} before, {time_text(step.after)} after"
    if step is comparison.rank_step_us:
        sizes += ", on one rank"
    if step.verdict == "unknown":
        return f"not known whether a step is faster or slower ({sizes}): {comparison.undecided}."
    if step.verdict == "same":
        most = max(-(step.low or 0.0), step.high or 0.0) / step.before
        return (
            f"no difference of the steps stands out from noise ({sizes}); one of more than "
            f"{share_text(most)} is ruled out."
        )
    faster = step.verdict == "less"
    factor = step.before / step.after if faster else step.after / step.before
    text = f"a step is {factor:.2f} times {'faster' if faster else 'slower'} ({sizes})"
    if len(comparison.before_runs) == len(comparison.after_runs) == 1:
        noise = comparison.noise
        text += (
            f", by one run a side: more than the {share_text(noise.step)} by which runs of the "
            f"same job on {noise.article} machine differ"
        )
    return f"{text}."


def _names(runs: Sequence[str]) -> str:
    return ", ".join(map(printable, runs))


def _cells(row: Difference, text: Callable[[float | None], str], has_interval: bool) -> list[str]:
    interval = []
    if has_interval:
        known = row.low is not None and row.high is not None
        interval = [f"{text(row.low)} .. {text(row.high)}" if known else NOT_KNOWN]
    change = text(row.change)
    if row.change is not None and row.change > 0:
        change = f"+{change}"
    verdict = {"same": "noise", "unknown": "?"}.get(row.verdict, row.verdict)
    return [row.name, text(row.before), text(row.after), change, *interval, verdict]


def _some(row: Difference) -> bool:
    return bool(row.before or row.after)


class _Sides:
    """The runs of both sides.

    Attributes:
        noise: What equal runs are known to differ by.
    """

    def __init__(self, before: Runs, after: Runs) -> None:
        self._sides = before, after
        several = max(len(before), len(after)) > 1
        self.noise = noise_between([*before, *after], several=several)
        means = [self._values(side, lambda row: row.wall_us) for side in self._sides]
        known = [float(np.mean([run.mean for run in side])) for side in means if side]
        self._step_us = float(np.mean(known)) if known else 0.0

    def step(self) -> Difference:
        """The wall time of a step."""
        return self._of_steps("step", lambda row: row.wall_us, self.noise.step)

    def rank_step(self) -> Difference:
        """The duration of a step on one rank."""
        sides = [_runs(map(_means_over_ranks, side)) for side in self._sides]
        return self._times(RANK_STEP, sides, self.noise.step)

    def shares(self) -> tuple[Difference, ...]:
        """The overlap ratio and the shares of a step."""
        values: dict[str, Callable[[StepRow], float | None]] = {
            "overlap_ratio": lambda row: row.overlap_ratio,
            "compute_share": lambda row: row.compute_share,
            "exposed_comm_share": lambda row: row.exposed_comm_share,
            "idle_share": lambda row: row.idle_share,
        }
        return tuple(
            _difference(
                name,
                *(self._values(side, value) for side in self._sides),
                noise=self.noise.share,
                same=_SAME,
                most=1.0,
            )
            for name, value in values.items()
        )

    def parts(self) -> tuple[Difference, ...]:
        """The parts of the critical path."""
        return tuple(
            self._of_steps(
                name,
                lambda row, name=name: getattr(row.critical_path, f"{name}_us"),  # type: ignore[misc]
                self.noise.part,
            )
            for name in CATEGORIES
        )

    def ranks(self) -> tuple[Difference, ...]:
        """The ranks' own steps."""
        sides = [[_own_steps(run) for run in side] for side in self._sides]
        return tuple(
            self._times(f"rank {rank}", [[run[rank] for run in side] for side in sides],
                        self.noise.step)
            for rank in _common(sides)
        )  # fmt: skip

    def tensors(self) -> tuple[Difference, ...]:
        """The exposed communication of the tensors."""
        sides = [
            [
                {
                    # Periods may differ by a step in length: the mean is that of the steps.
                    row.name: RunValues(row.exposed_us, _numbers(run.tensor_course[row.name]))
                    for row in run.tensors
                    if row.exposed_us is not None
                }
                for run in side
            ]
            for side in self._sides
        ]
        return tuple(
            self._times(name, [[run[name] for run in side] for side in sides], self.noise.part)
            for name in _common(sides)
        )

    def _of_steps(
        self, name: str, value: Callable[[StepRow], float | None], noise: float
    ) -> Difference:
        return self._times(name, [self._values(side, value) for side in self._sides], noise)

    def _times(self, name: str, sides: Sequence[Sequence[RunValues]], noise: float) -> Difference:
        """Compares times, whose noise is a share of the step."""
        step = self._step_us
        return _difference(name, *sides, noise=noise * step, same=_SAME * step)

    def _values(self, side: Runs, value: Callable[[StepRow], float | None]) -> list[RunValues]:
        """A number in each run; nothing if a run does not have it."""
        return _runs(_numbers([value(row) for row in run.steps if row.steady]) for run in side)


def _runs(values: Iterable[npt.NDArray[np.float64]]) -> list[RunValues]:
    """A number in each run; nothing if a run does not have it."""
    found = list(values)
    known = all(len(each) for each in found)
    return [RunValues(float(each.mean()), each) for each in found] if known else []


def _difference(
    name: str,
    before: Sequence[RunValues],
    after: Sequence[RunValues],
    *,
    noise: float,
    same: float,
    most: float = math.inf,
) -> Difference:
    """Compares a number of both sides.

    Args:
        name: Name of the number.
        before: Its values in the runs of the first side; empty if it is not known.
        after: The same of the second side.
        noise: What equal runs differ by.
        same: A difference that has to be ruled out for them to be the same.
        most: What the number can be at most; at least, it is 0.
    """
    means = [float(np.mean([run.mean for run in side])) if side else None
             for side in (before, after)]  # fmt: skip
    if means[0] is None or means[1] is None:
        return Difference(name, means[0], means[1], None, None, None, "unknown")
    interval = difference_interval(before, after, noise)
    verdict, low, high = "unknown", None, None
    if interval is not None:
        low, high = max(interval[0], -means[0]), min(interval[1], most - means[0])
        several = max(len(before), len(after)) > 1
        if high < 0:
            verdict = "less"
        elif low > 0:
            verdict = "more"
        elif several and max(-low, high) < same:
            verdict = "same"
    return Difference(name, means[0], means[1], means[1] - means[0], low, high, verdict)


def _common(sides: Sequence[Sequence[Mapping[Any, RunValues]]]) -> list[Any]:
    """The keys that all runs have, in the order of the first run."""
    runs = [run for side in sides for run in side]
    return [key for key in runs[0] if all(key in run for run in runs)]


def _numbers(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.array([value for value in values if value is not None], np.float64)


def _own_steps(analysis: Analysis) -> dict[int, RunValues]:
    """Rank -> durations of its steady steps, microseconds."""
    ranks, _, walls = _steady_rank_steps(analysis)
    return {
        rank: RunValues(float(walls[mine].mean()), walls[mine])
        for rank, mine in places_by_value(ranks)
    }


def _means_over_ranks(analysis: Analysis) -> npt.NDArray[np.float64]:
    """Durations of the steady steps on one rank, microseconds: the mean over ranks of each."""
    _, steps, walls = _steady_rank_steps(analysis)
    _, place = np.unique(steps, return_inverse=True)
    return np.bincount(place, walls) / np.bincount(place)


def _steady_rank_steps(
    analysis: Analysis,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Ranks, numbers and durations in microseconds of the steady steps on each rank."""
    columns = analysis.rank_steps
    steady = np.isin(columns["step"], [row.step for row in analysis.steps if row.steady])
    return (
        columns["rank"][steady],
        columns["step"][steady],
        columns["wall_ns"][steady] / 1e3,
    )
