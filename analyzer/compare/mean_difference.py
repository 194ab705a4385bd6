"""Confidence interval of a difference of means over autocorrelated steps.

Means, because the parts of a step then differ by what adds up to the step's own difference. Only
the experiments, which compare nothing but whole steps, take medians
(`ddltrace.experiments.harness.step_intervals`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEVEL: Final = 0.95
"""Confidence level of every interval."""

MIN_STEPS: Final = 5
"""Fewer steps than this on either side have no interval."""

_Z: Final = 1.959964
"""Of a normal variable, (1 + LEVEL) / 2 lies below this."""

_MOST_ALIKE: Final = 0.9


def difference_interval(
    before: npt.NDArray[Any], after: npt.NDArray[Any]
) -> tuple[float, float] | None:
    """Interval of mean(after) - mean(before) at `LEVEL`; None for fewer than five steps.

    Welch's interval, with as many steps as there would be if none resembled the one before it:
    a slow step is seldom alone, and steps that are counted one by one would make the interval
    too narrow.
    """
    if min(len(before), len(after)) < MIN_STEPS:
        return None
    difference = float(np.mean(after) - np.mean(before))
    (first, first_freedom), (second, second_freedom) = map(_of_mean, (before, after))
    variance = first + second
    if variance <= 0.0:
        return difference, difference
    freedom = variance**2 / (first**2 / first_freedom + second**2 / second_freedom)
    half = student_quantile(freedom) * variance**0.5
    return difference - half, difference + half


def _of_mean(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Variance of the mean of values in order, and its degrees of freedom.

    n values with a correlation of r to the one before count as n (1 - r) / (1 + r) (Bayley and
    Hammersley, J. R. Stat. Soc. Suppl. 8(2), 1946). What is measured of r is too small by
    (1 + 3 r) / n (Kendall, Biometrika 41, 1954).
    """
    count = len(values)
    apart = np.asarray(values, np.float64) - np.mean(values)
    squares = float(apart @ apart)
    if squares <= 0.0:
        return 0.0, count - 1.0
    measured = float(apart[1:] @ apart[:-1]) / squares
    alike = min(max((measured * count + 1) / (count - 3), 0.0), _MOST_ALIKE)
    worth = max(count * (1 - alike) / (1 + alike), 2.0)
    return squares / count / (worth - 1), worth - 1


def student_quantile(freedom: float) -> float:
    """The quantile of Student's t that `_Z` is of a normal variable.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5; below three degrees of
    freedom, where that series no longer holds, the exact values of one and two.
    """
    if freedom < 3:
        return float(np.interp(freedom, [1, 2, 3], [12.706, 4.303, 3.182]))
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
