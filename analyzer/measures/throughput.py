"""Samples and tokens per second, and floating-point operations, from the ranks' steps."""

from __future__ import annotations

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray, places_by_value
from ddltrace.analyzer.measures.measure import Whole


def rates_of_ranks(whole: Whole, column: str) -> dict[int, float]:
    """Rank -> what it loads per second in its steady steps, if that is known.

    Args:
        whole: All steps.
        column: ``samples`` or ``tokens``.
    """
    walls = sums_of_ranks(whole, "wall_ns")
    return {
        rank: total / walls[rank] * 1e9
        for rank, total in sums_of_ranks(whole, column).items()
        if total > 0 and walls[rank] > 0
    }


def sums_of_ranks(whole: Whole, column: str) -> dict[int, float]:
    """Rank -> the sum over its steady steps; NaN if it is not known of one of them.

    Args:
        whole: All steps.
        column: A column of `rank_steps`.
    """
    values, ranks = _counted(whole, column), _counted(whole, "rank").astype(np.int64)
    return {rank: float(values[places].sum()) for rank, places in places_by_value(ranks)}


def flops_per_step(whole: Whole) -> float | None:
    """Floating-point operations of a rank in a step, mean of the steps of which they are known."""
    trace = whole.trace
    if any(info.dropped for rank in trace.ranks for info in trace.infos(rank)):
        return None  # an operator may be lost
    flops = whole.rank_steps["flops"]
    known = flops[~np.isnan(flops)]
    return float(known.mean()) if len(known) else None


def flops_utilization(whole: Whole) -> float | None:
    """The share of the devices' peak at which ranks compute; None if one of both is not known."""
    flops, peak = flops_per_step(whole), whole.trace.peak_tflops
    walls = _counted(whole, "wall_ns")
    if flops is None or peak is None or not len(walls):
        return None
    return utilization(flops, float(walls.mean()) / 1e9, peak)


def utilization(flops: float, step_s: float, peak_tflops: float) -> float:
    """The share of the peak at which a device computes a step of some operations."""
    return flops / step_s / (peak_tflops * 1e12)


def _counted(whole: Whole, column: str) -> FloatArray:
    return whole.rank_steps[column][whole.window]
