"""Confidence intervals of step times and of their ratios, over rounds or within one run.

An experiment runs every strategy once in each round. The median step of a run is one
observation; rounds are the blocks. These intervals include variation between runs (placement, other
load, the state of the network). With a single round, the interval is computed over the steps of
that run and is too narrow; every result states which of the two it is.

Medians are used, because a single slow step must not determine the result.
Differences of means are in `ddltrace.analyzer.compare.mean_difference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ddltrace.analyzer.compare.mean_difference import LEVEL, student_quantile

Over = Literal["rounds", "steps"]
"""The units of an interval: the medians of several rounds, or the steps of one run."""

Rounds = Mapping[int, Sequence[float]]
"""Step times in microseconds of one strategy, by the number of the round."""

_MIN_STEPS: Final = 8
_RESAMPLES: Final = 2000
_ELEMENTS_AT_ONCE: Final = 1 << 21


@dataclass(frozen=True)
class StepTime:
    """A strategy's step time with its interval.

    Attributes:
        us: Mean over rounds of the median step, microseconds.
        low_us, high_us: Bounds of the interval; None if there are too few steps.
        over: The units that the interval is computed over: rounds or steps.
        rounds: Number of rounds.
        confidence: Confidence level of the interval, as a fraction.
    """

    us: float
    low_us: float | None
    high_us: float | None
    over: Over
    rounds: int
    confidence: float = LEVEL


@dataclass(frozen=True)
class Difference:
    """A step time's relative difference to another one, with its confidence interval.

    Attributes:
        relative: Step time over the baseline's, minus 1: -0.2 is a fifth less.
        low, high: Bounds of the interval.
        confidence: Confidence level of the interval, as a fraction.
        over: The units that the interval is computed over: rounds or steps.
    """

    relative: float
    low: float
    high: float
    confidence: float = LEVEL
    over: Over = "steps"

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True)
class Speedup:
    """How many times faster a strategy's step is than another one's.

    Attributes:
        ratio: The other's step time over this one's: above 1 is faster.
        low, high: Bounds of the interval at `LEVEL`.
        verdict: ``faster`` or ``slower`` if 1 is outside the interval, else ``noise``.
        over: The units that the interval is computed over: rounds or steps.
        reference: The spec of the strategy that it is measured against.
    """

    ratio: float
    low: float
    high: float
    verdict: Literal["faster", "slower", "noise"]
    over: Over
    reference: str


def step_time(rounds: Rounds) -> StepTime | None:
    """The step time over rounds.

    Student's interval of the mean of the rounds' medians; within a single round, a bootstrap
    interval of the median over its steps.

    Args:
        rounds: Step times by round; rounds without steps are left out.

    Returns:
        The step time; None if no round has steps.
    """
    filled = {number: steps for number, steps in rounds.items() if len(steps)}
    if not filled:
        return None
    medians = np.array([np.median(steps) for steps in filled.values()])
    mean = float(medians.mean())
    if len(medians) > 1:
        half = _half_width(medians)
        return StepTime(mean, mean - half, mean + half, "rounds", len(medians))
    (steps,) = filled.values()
    if len(steps) < _MIN_STEPS:
        return StepTime(mean, None, None, "steps", 1)
    resampled = _resampled_medians(steps, np.random.default_rng(0))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return StepTime(mean, float(low), float(high), "steps", 1)


def compare_rounds(rounds: Rounds, baseline: Rounds) -> Difference | None:
    """The relative difference of two strategies' step times, blocked by round.

    Over the rounds that both have: the mean of log(median / baseline's median) with Student's
    interval. A drift that slows both runs of a round cancels out. With one common round the
    interval is that of `compare_medians`.

    Args:
        rounds: Step times by round.
        baseline: Those of the strategy to compare with, in the same unit.

    Returns:
        The difference; None if there is no common round or it has too few steps.
    """
    common = [r for r in sorted(set(rounds) & set(baseline)) if len(rounds[r]) and len(baseline[r])]
    if not common:
        return None
    if len(common) == 1:
        return compare_medians(rounds[common[0]], baseline[common[0]])
    logs = np.array([np.log(np.median(rounds[r]) / np.median(baseline[r])) for r in common])
    mean, half = float(logs.mean()), _half_width(logs)
    relative, low, high = (float(np.expm1(value)) for value in (mean, mean - half, mean + half))
    return Difference(relative, low, high, over="rounds")


def compare_medians(values: Sequence[float], baseline: Sequence[float]) -> Difference | None:
    """The relative difference of two medians over the steps of two runs.

    Bootstrap with circular blocks (Politis & Romano 1992), because neighbouring steps resemble
    each other; blocks of about n^(1/3) steps. The interval does not include variation between runs.

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


def speedup(difference: Difference, reference: str) -> Speedup:
    """A difference as a speed-up over the strategy `reference`."""
    verdict: Literal["faster", "slower", "noise"] = "noise"
    if difference.is_clear:
        verdict = "faster" if difference.relative < 0 else "slower"
    ratio, low, high = (
        1 / (1 + value) for value in (difference.relative, difference.high, difference.low)
    )
    return Speedup(ratio, low, high, verdict, difference.over, reference)


def _half_width(values: NDArray[np.float64]) -> float:
    """Half the width of Student's interval of a mean."""
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    return float(student_quantile(len(values) - 1.0) * error)


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
