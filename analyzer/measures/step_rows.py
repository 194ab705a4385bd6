"""One row per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.path_parts import CopyTimes, PathTotals, path_copies, path_totals
from ddltrace.analyzer.measures.steps import Steps


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


def step_rows(
    steps: Steps, rank_steps: Mapping[str, FloatArray], paths: Mapping[int, Path], origin_ns: int
) -> tuple[StepRow, ...]:
    """One row per step.

    Args:
        steps: The steps.
        rank_steps: Measures of every rank in each step.
        paths: Step -> its critical path.
        origin_ns: Where the trace begins, ns on rank 0's clock.
    """
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
