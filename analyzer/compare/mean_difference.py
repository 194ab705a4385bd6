"""Confidence interval of a difference of means over runs, and over their autocorrelated steps.

The steps of one run do not show what differs from run to run, such as the placement of processes
or what else the machine does. So an interval is over runs where there are several, and never
narrower than runs are known to differ anyway (`ddltrace.analyzer.compare.run_noise`).

Means, because the parts of a step then differ by what adds up to the step's own difference. Only
the experiments, which compare nothing but whole steps, take medians
(`ddltrace.experiments.harness.step_intervals`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEVEL: Final = 0.95
"""Confidence level of every interval."""

MIN_STEPS: Final = 5
"""Fewer steps than this in a run have no interval."""

_Z: Final = 1.959964
"""Of a normal variable, (1 + LEVEL) / 2 lies below this."""

_MOST_ALIKE: Final = 0.9


@dataclass(frozen=True)
class RunValues:
    """A number in one run.

    Attributes:
        mean: Its mean over the steady steps.
        steps: Its values in steps, or in periods of several steps, in order.
    """

    mean: float
    steps: npt.NDArray[Any]


def difference_interval(
    before: Sequence[RunValues], after: Sequence[RunValues], noise: float
) -> tuple[float, float] | None:
    """Interval of the difference of two means of run means, after - before, at `LEVEL`.

    The wider of two: Welch's interval over the means of the runs; and by how much equal runs
    differ anyway together with the interval over the steps of these runs. With one run a side,
    there is only the second one. If only one side has several runs, the variance between them
    stands for both sides.

    Args:
        before: The runs of one side, at least one.
        after: Those of the other.
        noise: What equal runs differ by, in the unit of the values: of one run a side.

    Returns:
        The interval; None for one run a side of which one has fewer than five steps.
    """
    sides = before, after
    change = float(np.mean([run.mean for run in after]) - np.mean([run.mean for run in before]))
    within = [_over_steps(side) for side in sides]
    if max(map(len, sides)) == 1 and None in within:
        return None
    known = [part for part in within if part is not None]
    over_steps = _half_width(known) if len(known) == 2 else 0.0
    parts = 1 / len(before) + 1 / len(after)
    half = max(math.hypot(noise * math.sqrt(parts / 2), over_steps), _over_runs(sides))
    return change - half, change + half


def _over_runs(sides: tuple[Sequence[RunValues], Sequence[RunValues]]) -> float:
    """Half of Welch's interval over run means; 0 with one run a side."""
    spreads = [
        (float(np.var([run.mean for run in side], ddof=1)), len(side) - 1.0)
        for side in sides
        if len(side) > 1
    ]
    if not spreads:
        return 0.0
    if len(spreads) == 1:
        parts = sum(1 / len(side) for side in sides)
        return student_quantile(spreads[0][1]) * math.sqrt(spreads[0][0] * parts)
    return _half_width(
        [(spread / len(side), freedom)
         for (spread, freedom), side in zip(spreads, sides, strict=True)]
    )  # fmt: skip


def _over_steps(side: Sequence[RunValues]) -> tuple[float, float] | None:
    """Variance of the mean of runs by their steps alone, and its degrees of freedom.

    None if a run has fewer than five steps.
    """
    if min(len(run.steps) for run in side) < MIN_STEPS:
        return None
    found = [_of_mean(run.steps) for run in side]
    variance = sum(variance for variance, _ in found)
    if variance <= 0.0:
        return 0.0, sum(freedom for _, freedom in found)
    freedom = variance**2 / sum(part**2 / freedom for part, freedom in found)
    return variance / len(side) ** 2, freedom


def _half_width(parts: Sequence[tuple[float, float]]) -> float:
    """Half of Welch's interval of a difference.

    Args:
        parts: Of both means, the variance and its degrees of freedom.
    """
    variance = sum(part for part, _ in parts)
    if variance <= 0.0:
        return 0.0
    freedom = variance**2 / sum(part**2 / freedom for part, freedom in parts)
    return student_quantile(freedom) * math.sqrt(variance)


def _of_mean(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Variance of the mean of values in order, and its degrees of freedom.

    As many steps count as there would be if none resembled the one before it: a slow step is
    seldom alone, and steps counted one by one would make the interval too narrow.
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
