"""Two traces side by side: where the time went, and whether a difference is more than noise."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.compare.mean_difference import LEVEL, difference_interval
from ddltrace.analyzer.compare.work_difference import (
    OperationChange,
    WorkDifference,
    operation_changes,
    render_changes,
    work_difference,
)
from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text, time_text
from ddltrace.analyzer.model import CATEGORIES, Analysis, StepRow

SCHEMA: Final = "ddltrace.comparison/1"
_MAX_ROWS: Final = 10


@dataclass(frozen=True)
class Difference:
    """One number of both traces, over their steady steps.

    Attributes:
        name: Name of the number.
        before: Mean in the first trace; None if the trace does not contain it.
        after: Mean in the second.
        change: after - before.
        low: Lower end of the interval of `change`; None with too few steps.
        high: Upper end.
        verdict: ``less``, ``more``, ``same`` (zero lies in the interval) or ``unknown``.
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
    """Two traces compared.

    Attributes:
        before: Name of the first trace.
        after: Name of the second.
        level: Confidence level of the intervals.
        step_us: Wall time of a step.
        shares: Overlap ratio and shares of the step, by the names of the summary.
        critical_path: Microseconds a step by category.
        ranks: Microseconds a step and rank that both have: its own step time.
        tensors: Exposed microseconds a step and rank of each tensor that both have, its
            interval over periods of several steps where a run has more than 64.
        work: Whether both run the same kernels and operators; read this first.
        kernels: Kernels and copies that differ, the largest change of time first.
        operators: Operators and runtime calls that differ, the largest change first.
    """

    before: str
    after: str
    level: float
    step_us: Difference
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


def compare(before: Analysis, after: Analysis) -> Comparison:
    """Compares two analyses, each over its own steady steps."""
    sides = (before, after)
    work, kernels, operators = compare_work(before, after)
    return Comparison(
        before=before.trace.name,
        after=after.trace.name,
        level=LEVEL,
        step_us=compare_steps(before, after),
        shares=compare_shares(before, after),
        critical_path=tuple(
            _of_steps(name, lambda row, name=name: getattr(row.critical_path, f"{name}_us"), sides)  # type: ignore[misc]
            for name in CATEGORIES
        ),
        ranks=_ranks(before, after),
        tensors=_tensors(before, after),
        work=work,
        kernels=kernels,
        operators=operators,
    )


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


def compare_steps(before: Analysis, after: Analysis) -> Difference:
    """Compares the wall times of the steady steps of two analyses, microseconds."""
    return _of_steps("step", lambda row: row.wall_us, (before, after))


def compare_shares(before: Analysis, after: Analysis) -> tuple[Difference, ...]:
    """Compares the overlap ratio and the shares of the steady steps, by the summary's names."""
    values: dict[str, Callable[[StepRow], float | None]] = {
        "overlap_ratio": lambda row: row.overlap_ratio,
        "compute_share": lambda row: row.compute_share,
        "exposed_comm_share": lambda row: row.exposed_comm_share,
        "idle_share": lambda row: row.idle_share,
    }
    return tuple(_of_steps(name, value, (before, after)) for name, value in values.items())


def render_comparison(comparison: Comparison, width: int = 100) -> str:
    """The comparison for a terminal."""
    step = comparison.step_us
    head = f"{printable(comparison.before)} -> {printable(comparison.after)}: {_sentence(step)}"
    header = ["", "before", "after", "change", f"{comparison.level:.0%} interval", ""]
    times = [step, *comparison.critical_path]
    lines = [
        *textwrap.wrap(comparison.work.sentence, width),
        head,
        *render_changes("Kernels and copies", comparison.kernels, width),
        *render_changes("Operators and runtime calls", comparison.operators, width),
        "",
        "A step and its critical path (mean over steady steps)",
        *render(header, [_cells(row, time_text) for row in times if _some(row)], width),
        "",
        "Shares of the step",
        *render(header, [_cells(row, share_text) for row in comparison.shares], width),
    ]
    for title, rows in (
        ("Step time by rank", comparison.ranks),
        ("Exposed communication by tensor", comparison.tensors),
    ):
        shown = sorted(rows, key=lambda row: -abs(row.change or 0.0))[:_MAX_ROWS]
        if shown:
            cells = [_cells(row, time_text) for row in shown]
            lines += ["", f"{title} (largest changes)", *render(header, cells, width)]
    return "\n".join(lines)


def _sentence(step: Difference) -> str:
    if step.change is None or not step.before or step.after is None:
        return "a step cannot be compared: one of them has no completed steps."
    ratio = step.before / step.after if step.after else float("inf")
    sizes = f"{time_text(step.before)} before, {time_text(step.after)} after"
    if step.verdict == "unknown":
        return f"a step takes {sizes}; too few steps to tell a change from noise."
    if step.verdict == "same":
        return f"no change of the step time that stands out from noise ({sizes})."
    word = "faster" if step.verdict == "less" else "slower"
    factor = ratio if step.verdict == "less" else 1 / ratio
    return f"a step is {factor:.2f} times {word} ({sizes})."


def _cells(row: Difference, text: Callable[[float | None], str]) -> list[str]:
    interval = NOT_KNOWN
    if row.low is not None and row.high is not None:
        interval = f"{text(row.low)} .. {text(row.high)}"
    change = text(row.change)
    if row.change is not None and row.change > 0:
        change = f"+{change}"
    verdict = {"same": "noise", "unknown": "?"}.get(row.verdict, row.verdict)
    return [row.name, text(row.before), text(row.after), change, interval, verdict]


def _some(row: Difference) -> bool:
    return bool(row.before or row.after)


def _steady(analysis: Analysis) -> list[StepRow]:
    return [row for row in analysis.steps if row.steady]


def _of_steps(
    name: str, value: Callable[[StepRow], float | None], sides: tuple[Analysis, Analysis]
) -> Difference:
    """Compares a number of the steady steps."""
    return _difference(name, *([value(row) for row in _steady(side)] for side in sides))


def _difference(
    name: str, before: Sequence[float | None], after: Sequence[float | None]
) -> Difference:
    first, second = _numbers(before), _numbers(after)
    if first is None or second is None:
        means = [None if part is None else float(part.mean()) for part in (first, second)]
        return Difference(name, means[0], means[1], None, None, None, "unknown")
    change = float(second.mean() - first.mean())
    interval = difference_interval(first, second)
    if interval is None:
        verdict, low, high = "unknown", None, None
    else:
        low, high = interval
        verdict = "less" if high < 0 else "more" if low > 0 else "same"
    return Difference(name, float(first.mean()), float(second.mean()), change, low, high, verdict)


def _numbers(values: Sequence[float | None]) -> npt.NDArray[np.float64] | None:
    known = [value for value in values if value is not None]
    return np.array(known) if known else None


def _ranks(before: Analysis, after: Analysis) -> tuple[Difference, ...]:
    sides = [_own_steps(before), _own_steps(after)]
    both = sorted(set(sides[0]) & set(sides[1]))
    return tuple(_difference(f"rank {rank}", sides[0][rank], sides[1][rank]) for rank in both)


def _own_steps(analysis: Analysis) -> dict[int, list[float | None]]:
    """Rank -> durations of its steady steps, microseconds."""
    steady = {row.step for row in _steady(analysis)}
    walls: dict[int, list[float | None]] = {}
    columns = analysis.rank_steps
    for rank, step, wall in zip(
        columns["rank"].tolist(), columns["step"].tolist(), columns["wall_ns"].tolist(), strict=True
    ):
        if step in steady:
            walls.setdefault(int(rank), []).append(wall / 1e3)
    return walls


def _tensors(before: Analysis, after: Analysis) -> tuple[Difference, ...]:
    first, second = ({row.name: row.exposed_us for row in side.tensors} for side in (before, after))
    rows = []
    for name, mean in first.items():
        other = second.get(name)
        if mean is not None and other is not None:
            course = (part.tensor_course[name].tolist() for part in (before, after))
            # Periods may differ by a step in length: the means are those of the steps.
            row = replace(_difference(name, *course), before=mean, after=other)
            rows.append(replace(row, change=other - mean))
    return tuple(rows)
