"""How sure the difference between the median steps of two runs is.

Medians, because a strategy is judged by its usual step and one slow step must not decide. What
`ddltrace compare` says of means is in `ddltrace.analyzer.compare.mean_difference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ddltrace.analyzer.compare.mean_difference import LEVEL

_MIN_STEPS: Final = 8
_RESAMPLES: Final = 2000
_ELEMENTS_AT_ONCE: Final = 1 << 21


@dataclass(frozen=True)
class Difference:
    """A median's relative difference to the baseline's, with its confidence interval.

    Attributes:
        relative: Median over baseline's median, minus 1: -0.2 is a fifth less.
        low, high: Bounds of the interval.
        confidence: Of the interval, as a fraction.
    """

    relative: float
    low: float
    high: float
    confidence: float = LEVEL

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0.0 or self.high < 0.0


def compare_medians(values: Sequence[float], baseline: Sequence[float]) -> Difference | None:
    """The relative difference of two medians over the steps of two runs.

    Bootstrap with circular blocks (Politis & Romano 1992), because neighbouring steps resemble
    each other; blocks of about n^(1/3) steps. What differs from run to run and not from step
    to step is not in the interval.

    Args:
        values: Step times of one run, in order.
        baseline: Step times of the other, in the same unit.

    Returns:
        The difference; None with fewer than 8 steps on either side.
    """
    if min(len(values), len(baseline)) < _MIN_STEPS:
        return None
    random = np.random.default_rng(0)
    ratios = _resampled_medians(values, random) / _resampled_medians(baseline, random)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    estimate = float(np.median(values) / np.median(baseline))
    return Difference(relative=estimate - 1, low=float(low) - 1, high=float(high) - 1)


def _resampled_medians(values: Sequence[float], random: np.random.Generator) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    size = len(array)
    block = round(size ** (1 / 3))
    at_once = max(1, min(_RESAMPLES, _ELEMENTS_AT_ONCE // size))
    medians = []
    for first in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - first)
        starts = random.integers(0, size, (count, -(-size // block)))
        rows = (starts[:, :, None] + np.arange(block)).reshape(count, -1)[:, :size] % size
        medians.append(np.median(array[rows], axis=1))
    return np.concatenate(medians)
