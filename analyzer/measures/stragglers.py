"""Which rank is late, by how much, how often, and what it does longer than the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.columns import IntArray
from ddltrace.analyzer.join import Joined, State
from ddltrace.analyzer.model import StragglerRow

_CAUSES: Final = {
    "compute": "compute_ns",
    "data": "data_ns",
    "update": "update_ns",
    "host": "host_ns",
}
_MIN_SHARE: Final = 0.25
"""A cause must explain at least this part of the usual lateness to be named."""


def straggler_rows(
    joined: Joined,
    chosen: IntArray,
    rank_steps: Mapping[str, npt.NDArray[np.float64]],
    steady: IntArray,
    residual_ns: float | None,
) -> tuple[StragglerRow, ...]:
    """One row per rank that is ever the last to arrive, the worst first.

    Lateness is A - the median arrival; of two ranks, half the distance. The cause is the
    category in which the rank's median per step exceeds the median over the other ranks of
    theirs by most, if that explains a quarter of its usual lateness.

    Args:
        joined: All messages.
        chosen: Which collectives count.
        rank_steps: Measures per rank and step, see `ddltrace.analyzer.measures.breakdown`.
        steady: Which entries of `rank_steps` count.
        residual_ns: What the clocks cannot tell apart; None if that is unknown.
    """
    collectives = joined.collectives
    # Below three ranks the later is last by definition, but by how much it is still counts.
    usable = chosen & (collectives.ranks > 1)
    usable &= np.isin(collectives.state, (State.COMPLETE, State.OPEN))
    index = np.flatnonzero(usable & (collectives.last > collectives.first))
    last_rank = collectives.last_rank[index]
    lateness = collectives.last[index] - collectives.median[index]
    taken = np.flatnonzero(usable[joined.collective[joined.order]])
    took_part = np.bincount(joined.messages.rank[joined.order[taken]])
    rows = []
    for rank in np.unique(last_rank).tolist():
        mine = lateness[last_rank == rank]
        typical = float(np.median(mine))
        cause, excess = _cause(rank, rank_steps, steady, typical)
        rows.append(
            StragglerRow(
                rank=rank,
                lateness_us=typical / 1e3,
                lateness_us_total=float(mine.sum()) / 1e3,
                collectives_last=len(mine),
                share=len(mine) / int(took_part[rank]),
                cause=cause,
                cause_us=None if excess is None else excess / 1e3,
                unsure=residual_ns is None or (residual_ns > 0 and typical < residual_ns),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.lateness_us_total))


def _cause(
    rank: int,
    rank_steps: Mapping[str, npt.NDArray[np.float64]],
    steady: IntArray,
    lateness_ns: float,
) -> tuple[str | None, float | None]:
    ranks = rank_steps["rank"][steady]
    mine = ranks == rank
    if not mine.any():
        return None, None
    best, best_excess = None, 0.0
    for cause, column in _CAUSES.items():
        values = _exclusive(rank_steps, column)[steady]
        if np.isnan(values).any():
            continue
        others = _medians(ranks[~mine], values[~mine])
        if not others:
            return None, None
        excess = float(np.median(values[mine]) - np.median(others))
        if excess > best_excess:
            best, best_excess = cause, excess
    if best is None or best_excess < _MIN_SHARE * lateness_ns:
        return None, None
    return best, best_excess


def _exclusive(
    rank_steps: Mapping[str, npt.NDArray[np.float64]], column: str
) -> npt.NDArray[np.float64]:
    """Compute without the update, which counts as compute everywhere else."""
    values = rank_steps[column]
    return values - rank_steps["update_ns"] if column == "compute_ns" else values


def _medians(ranks: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> list[float]:
    if not len(ranks):
        return []
    order = np.argsort(ranks, kind="stable")
    bounds = np.flatnonzero(np.diff(ranks[order])) + 1
    return [float(np.median(part)) for part in np.split(values[order], bounds)]
