"""How sure a difference of means is, over steps that resemble their neighbours.

Means, because the parts of a step then differ by what adds up to the step's own difference. The
experiments compare whole steps only, by medians (`ddltrace.experiments.confidence`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEVEL: Final = 0.95
"""Confidence level of every interval."""

RESAMPLES: Final = 2000
"""How often the steps are drawn anew."""

_MIN_STEPS: Final = 5
_SEED: Final = 20_200_917


def difference_interval(
    before: npt.NDArray[Any], after: npt.NDArray[Any]
) -> tuple[float, float] | None:
    """Interval of mean(after) - mean(before) at `LEVEL`; None for fewer than five steps.

    Moving-block bootstrap (Kuensch, Annals of Statistics 17(3), 1989): blocks of n^(1/3)
    consecutive steps are drawn, because a slow step is seldom alone and steps drawn one by one
    would make the interval too narrow. The random numbers are the same at every call.
    """
    if min(len(before), len(after)) < _MIN_STEPS:
        return None
    random = np.random.default_rng(_SEED)
    drawn = _block_means(after, random) - _block_means(before, random)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _block_means(values: npt.NDArray[Any], random: np.random.Generator) -> npt.NDArray[Any]:
    size = max(1, round(len(values) ** (1 / 3)))
    blocks = -(-len(values) // size)
    sums = np.append(0.0, np.cumsum(values))
    starts = random.integers(0, len(values) - size + 1, (RESAMPLES, blocks))
    return np.asarray((sums[starts + size] - sums[starts]).sum(axis=1) / (blocks * size))
