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
    rank, amount, wall = (_counted(whole, name) for name in ("rank", column, "wall_ns"))
    found = {}
    for number, places in places_by_value(rank.astype(np.int64)):
        total, ns = float(amount[places].sum()), float(wall[places].sum())
        if total > 0 and ns > 0:
            found[number] = total / ns * 1e9
    return found


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
    return flops / (float(walls.mean()) / 1e9) / (peak * 1e12)


def _counted(whole: Whole, column: str) -> FloatArray:
    return whole.rank_steps[column][whole.window]
