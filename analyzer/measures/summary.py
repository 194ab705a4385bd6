"""The run over its steady steps and all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.dimensions import DIMENSIONS
from ddltrace.analyzer.measures.idle import IdleShares, idle_shares
from ddltrace.analyzer.measures.measure import Whole, derived
from ddltrace.analyzer.measures.throughput import (
    flops_per_step,
    flops_utilization,
    rates_of_ranks,
)

_SHARE_BATCHES: Final = frozenset({"tensor", "pipeline", "context"})
"""Dimensions whose ranks work on the same samples."""

OVERLAPPING: Final = 0.05
"""By which share of its wall time a step takes less on one rank where ranks' steps overlap."""


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
        samples_per_s: Samples per second of all ranks that load data, the sum of those of the
            ranks (see `RankRow`). Null unless that is known of all batches, and in jobs with groups
            of tensor, pipeline or context parallelism, whose ranks work on the same samples.
        tokens_per_s: Tokens per second likewise.
        flops_per_step: Floating-point operations of a rank in a step, mean: of the matrix
            multiplications, convolutions and attention that it executes, by the formulas of
            PyTorch's flop counter; also those that activation checkpointing repeats. Null without
            level ``op``, and for graphs of the device.
        mfu: Model FLOPS utilization: `flops_per_step` over the mean step and the device's peak.
            With activation checkpointing, this is the hardware FLOPS utilization, which is higher.
            Null unless the peak is given (``--peak-tflops``).
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
    samples_per_s: float | None
    tokens_per_s: float | None
    flops_per_step: float | None
    mfu: float | None
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
        samples_per_s=_rate_of_job(whole, "samples"),
        tokens_per_s=_rate_of_job(whole, "tokens"),
        flops_per_step=flops_per_step(whole),
        mfu=flops_utilization(whole),
        idle=idle_shares(share),
        steps=int(steps.steady.sum()),
        warmup_steps=int((~steps.steady).sum()),
        rule=steps.rule,
    )


def _rate_of_job(whole: Whole, column: str) -> float | None:
    """What all ranks load per second; None if it is not known, or if ranks share samples."""
    if not _SHARE_BATCHES.isdisjoint(whole.found.of(DIMENSIONS)):
        return None
    if np.isnan(whole.rank_steps[column][whole.window]).any():
        return None
    return sum(rates_of_ranks(whole, column).values()) or None


def _times(values: FloatArray) -> StepTimes:
    if not len(values):
        return StepTimes(None, None, None)
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return StepTimes(p50=p50, p95=p95, mean=float(values.mean()))


SUMMARY: Final = derived("summary", _summary)
