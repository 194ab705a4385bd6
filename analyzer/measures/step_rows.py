"""One row per step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, merged_by
from ddltrace.analyzer.measures.path_parts import CopyTimes, PathTotals, path_copies, path_totals
from ddltrace.analyzer.measures.rank_measures import measure_ranks


@dataclass(frozen=True)
class StepRow:
    """One completed step over all ranks.

    Attributes:
        step: Its number.
        start_us: Its earliest start on any rank, from the trace's origin.
        wall_us: From its earliest start to its latest end on any rank.
        ranks: Number of ranks that completed it.
        steady: Whether the summary counts it.
        overlap_ratio: Sum of overlap over sum of communication, over ranks.
        compute_share: Sum of compute over sum of the step's durations, over ranks.
        exposed_comm_share: The same share of exposed communication.
        idle_share: The same share of idle time.
        critical_path: Its critical path by category.
        copies: The copies on its critical path by direction; they sum to `copy_us` there.
    """

    step: int
    start_us: float
    wall_us: float
    ranks: int
    steady: bool
    overlap_ratio: float | None
    compute_share: float | None
    exposed_comm_share: float | None
    idle_share: float | None
    critical_path: PathTotals
    copies: CopyTimes


def _step_rows(joined: JoinedSteps) -> tuple[StepRow, ...]:
    steps, paths, origin_ns = joined.steps, joined.paths, joined.origin_ns
    rank_steps = joined.once(measure_ranks).steps
    which = np.searchsorted(steps.number, rank_steps["step"]) if len(steps) else None
    sums = {
        name: np.bincount(which, weights=rank_steps[name], minlength=len(steps))
        for name in ("wall_ns", "compute_ns", "comm_ns", "overlap_ns", "exposed_ns", "idle_ns")
        if which is not None
    }
    rows = []
    for i, number in enumerate(steps.number.tolist()):
        wall = float(sums["wall_ns"][i])
        rows.append(
            StepRow(
                step=number,
                start_us=int(steps.start[i] - origin_ns) / 1e3,
                wall_us=int(steps.end[i] - steps.start[i]) / 1e3,
                ranks=int(steps.ranks[i]),
                steady=bool(steps.steady[i]),
                overlap_ratio=ratio(float(sums["overlap_ns"][i]), float(sums["comm_ns"][i])),
                compute_share=ratio(float(sums["compute_ns"][i]), wall),
                exposed_comm_share=ratio(float(sums["exposed_ns"][i]), wall),
                idle_share=ratio(float(sums["idle_ns"][i]), wall),
                critical_path=path_totals(paths[number]),
                copies=path_copies(paths[number]),
            )
        )
    return tuple(rows)


def _rows(whole: Whole) -> tuple[StepRow, ...]:
    """The rows of all steps; whether the first ones are warm-up is known after the last range."""
    steps = whole.steps
    steady = dict(zip(steps.number.tolist(), steps.steady.tolist(), strict=True))
    rows = sorted(whole.found.of(STEPS), key=lambda row: row.step)
    return tuple(replace(row, steady=steady[row.step]) for row in rows)


STEPS: Final = Measure(
    "steps", _rows, _step_rows, merged_by(lambda former, later: former + later), rows=StepRow
)
