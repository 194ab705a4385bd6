"""The run over its steady steps and all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.idle import IdleShares, idle_shares
from ddltrace.analyzer.measures.measure import Whole, derived


@dataclass(frozen=True)
class StepTimes:
    """Distribution of times of the steady steps; None without steps.

    Attributes:
        p50: Median.
        p95: 95th percentile.
        mean: Mean.
    """

    p50: float | None
    p95: float | None
    mean: float | None


@dataclass(frozen=True)
class Summary:
    """The run over its steady steps and all ranks.

    Each share is a sum of times over the sum of the durations of steps, both over all ranks and
    their steady steps.

    Attributes:
        step_us: Wall times of the steps, from first start to last end over all ranks. If ranks are
            not in step with each other, wall times of consecutive steps overlap.
        rank_step_us: Durations of the steps on each rank, which determine the throughput.
        overlap_ratio: Sum of overlap over sum of communication.
        compute_share: Share of compute.
        exposed_comm_share: Share of exposed communication.
        copy_share: Share of copies outside of compute and communication.
        idle_share: Share of idle time; with the three above it sums to 1.
        sync_overhead_share: Share of the time in which a message waits for its release and the
            rank does not compute (SketchDLC's synchronization overhead).
        update_overhead_share: Share of the optimizer's update (SketchDLC's update overhead).
        data_share: Share of data loading.
        idle: Causes of the ranks' idle time.
        steps: Number of steps that the summary covers; 0 for the whole traced window, without
            steps.
        warmup_steps: Number of completed steps that were left out.
        rule: How warm-up steps were distinguished from steady steps.
    """

    step_us: StepTimes
    rank_step_us: StepTimes
    overlap_ratio: float | None
    compute_share: float | None
    exposed_comm_share: float | None
    copy_share: float | None
    idle_share: float | None
    sync_overhead_share: float | None
    update_overhead_share: float | None
    data_share: float | None
    idle: IdleShares
    steps: int
    warmup_steps: int
    rule: str


def _summary(whole: Whole) -> Summary:
    steps, rank_steps, counted = whole.steps, whole.rank_steps, whole.window
    wall = float(rank_steps["wall_ns"][counted].sum())

    def share(column: str) -> float | None:
        return ratio(float(rank_steps[column][counted].sum()), wall)

    own = rank_steps["wall_ns"][counted] if len(steps) else np.empty(0)
    return Summary(
        step_us=_times((steps.end - steps.start)[steps.steady] / 1e3),
        rank_step_us=_times(own / 1e3),
        overlap_ratio=ratio(
            float(rank_steps["overlap_ns"][counted].sum()),
            float(rank_steps["comm_ns"][counted].sum()),
        ),
        compute_share=share("compute_ns"),
        exposed_comm_share=share("exposed_ns"),
        copy_share=share("copy_ns"),
        idle_share=share("idle_ns"),
        sync_overhead_share=share("sync_ns"),
        update_overhead_share=share("update_ns"),
        data_share=share("data_ns"),
        idle=idle_shares(share),
        steps=int(steps.steady.sum()),
        warmup_steps=int((~steps.steady).sum()),
        rule=steps.rule,
    )


def _times(values: FloatArray) -> StepTimes:
    if not len(values):
        return StepTimes(None, None, None)
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return StepTimes(p50=p50, p95=p95, mean=float(values.mean()))


SUMMARY: Final = derived("summary", _summary)
