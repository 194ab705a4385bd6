"""Confidence intervals of step times and of their ratios, over rounds or within one run.

An experiment runs every strategy once in each round. The median step of a run is one
observation; rounds are the blocks. These intervals include variation between runs (placement, other
load, the state of the network). With a single round, the interval is computed over the steps of
that run, is too narrow and decides nothing; every result states which of the two it is.

Medians are used, because a single slow step must not determine the result. If a strategy exchanges
in some steps only, such as local SGD, the median step contains no exchange. Its median is of means
over one cycle of its exchanges instead, which begins at every step in turn.
Differences of means are in `ddltrace.analyzer.compare.mean_difference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ddltrace.analyzer.compare.mean_difference import (
    LEVEL,
    RunValues,
    difference_interval,
    student_quantile,
)
from ddltrace.analyzer.compare.run_noise import IDLE

Over = Literal["rounds", "steps"]
"""The units of an interval: the medians of several rounds, or the steps of one run."""

SAME: Final = 0.1
"""Rounds that rule out a larger relative difference than this have decided."""

_MIN_STEPS: Final = 8
_RESAMPLES: Final = 2000
_ELEMENTS_AT_ONCE: Final = 1 << 21


@dataclass(frozen=True)
class Timed:
    """The step times of one strategy.

    Attributes:
        rounds: Number of the round -> the times of its steps in order, microseconds.
        cycle_steps: Steps after which the strategy's exchanges repeat.
    """

    rounds: Mapping[int, Sequence[float]]
    cycle_steps: int = 1

    @property
    def filled(self) -> dict[int, Sequence[float]]:
        """The rounds that have steps, in their order."""
        return {
            number: self.rounds[number] for number in sorted(self.rounds) if self.rounds[number]
        }

    def median(self, number: int) -> float:
        """The median step of a round."""
        return float(np.median(means_over_cycles(self.rounds[number], self.cycle_steps)))


@dataclass(frozen=True)
class StepTime:
    """A strategy's step time with its interval.

    Attributes:
        us: Mean over rounds of the median step, microseconds; of a strategy that exchanges in
            some steps only, of means over one cycle of its exchanges.
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
        """Whether the interval is over rounds and excludes zero.

        The steps of one run do not contain the difference between runs, so one round is never
        clear.
        """
        return self.over == "rounds" and (self.low > 0.0 or self.high < 0.0)

    @property
    def is_decided(self) -> bool:
        """Whether further rounds are not needed: it is clear, or at most `SAME`."""
        return self.is_clear or (self.over == "rounds" and max(-self.low, self.high) < SAME)


@dataclass(frozen=True)
class Speedup:
    """How many times faster a strategy's step is than another one's.

    Attributes:
        ratio: The other's step time over this one's: above 1 is faster.
        low, high: Bounds of the 95 % interval.
        verdict: ``faster`` or ``slower`` if 1 is outside the interval over rounds, else ``noise``;
            one round is always ``noise``.
        over: The units that the interval is computed over: rounds or steps.
        reference: The spec of the strategy that it is measured against.
    """

    ratio: float
    low: float
    high: float
    verdict: Literal["faster", "slower", "noise"]
    over: Over
    reference: str


def means_over_cycles(steps: Sequence[float], cycle_steps: int) -> NDArray[np.float64]:
    """Means over as many steps in a row as one cycle has.

    Args:
        steps: Step times in order, at least one.
        cycle_steps: Steps after which the exchanges repeat.

    Returns:
        One mean for each step at which a whole cycle begins; the mean of all steps if they are
        fewer than a cycle has.
    """
    size = min(cycle_steps, len(steps))
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(steps, dtype=np.float64))])
    means: NDArray[np.float64] = (sums[size:] - sums[:-size]) / size
    return means


def step_time(timed: Timed) -> StepTime | None:
    """The step time over rounds.

    Student's interval of the mean of the rounds' medians; within a single round, a bootstrap
    interval of the median over its steps.

    Args:
        timed: Step times by round; rounds without steps are left out.

    Returns:
        The step time; None if no round has steps.
    """
    filled = timed.filled
    if not filled:
        return None
    medians = np.array([timed.median(number) for number in filled])
    mean = float(medians.mean())
    if len(medians) > 1:
        half = half_width(medians)
        return StepTime(mean, mean - half, mean + half, "rounds", len(medians))
    (steps,) = filled.values()
    if not _has_interval(steps, timed.cycle_steps):
        return StepTime(mean, None, None, "steps", 1)
    resampled = _resampled_medians(steps, timed.cycle_steps, np.random.default_rng(0))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return StepTime(mean, float(low), float(high), "steps", 1)


def compare_rounds(timed: Timed, baseline: Timed) -> Difference | None:
    """The relative difference of two strategies' step times, over all rounds of both.

    If both have the same rounds, the mean of log(median / baseline's median) with Student's
    interval, blocked by round: a drift that slows both runs of a round cancels out. While one has
    rounds that the other lacks, Welch's interval of the difference of the mean logarithms. Both
    are at least as wide as equal runs are known to differ. With one run each, the interval is that
    of `compare_medians`, which decides nothing.

    Args:
        timed: Step times by round.
        baseline: Those of the strategy to compare with.

    Returns:
        The difference; None if one has no steps, or one run each has too few.
    """
    sides = timed.filled, baseline.filled
    if not all(sides):
        return None
    if len(sides[0]) == len(sides[1]) == 1:
        (steps,), (others,) = (side.values() for side in sides)
        return compare_medians(steps, others, (timed.cycle_steps, baseline.cycle_steps))
    own, other = (
        np.log([strategy.median(number) for number in side])
        for strategy, side in zip((timed, baseline), sides, strict=True)
    )
    mean = float(own.mean() - other.mean())
    if sides[0].keys() == sides[1].keys():
        least = IDLE.step / len(own) ** 0.5
        half = max(half_width(own - other), least)
        low, high = mean - half, mean + half
    else:
        runs = [[RunValues(float(log), np.empty(0)) for log in logs] for logs in (other, own)]
        interval = difference_interval(runs[0], runs[1], IDLE.step)
        assert interval is not None  # one side has several runs
        low, high = interval
    mean, low, high = (float(np.expm1(value)) for value in (mean, low, high))
    return Difference(mean, low, high, over="rounds")


def compare_medians(
    values: Sequence[float], baseline: Sequence[float], cycles: tuple[int, int] = (1, 1)
) -> Difference | None:
    """The relative difference of two medians over the steps of two runs.

    Bootstrap with circular blocks (Politis & Romano 1992), because neighbouring steps resemble
    each other; blocks of about n^(1/3) steps, and of a cycle at least. The interval does not
    include variation between runs.

    Args:
        values: Step times of one run, in order.
        baseline: Step times of the other, in the same unit.
        cycles: Of each, the steps after which the exchanges repeat.

    Returns:
        The difference; None with fewer than 8 steps or two cycles on either side.
    """
    both = list(zip((values, baseline), cycles, strict=True))
    if not all(_has_interval(steps, cycle) for steps, cycle in both):
        return None
    random = np.random.default_rng(0)
    one, other = (_resampled_medians(steps, cycle, random) for steps, cycle in both)
    low, high = np.quantile(one / other, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mine, theirs = (float(np.median(means_over_cycles(steps, cycle))) for steps, cycle in both)
    estimate = mine / theirs
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


def half_width(values: NDArray[np.float64]) -> float:
    """Half the width of Student's interval of a mean.

    Args:
        values: At least two, of shape (n,).
    """
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    return float(student_quantile(len(values) - 1.0) * error)


def _has_interval(steps: Sequence[float], cycle_steps: int) -> bool:
    return len(steps) >= max(_MIN_STEPS, 2 * cycle_steps)


def _resampled_medians(
    values: Sequence[float], cycle_steps: int, random: np.random.Generator
) -> NDArray[np.float64]:
    array = means_over_cycles(values, cycle_steps)
    size = len(array)
    block = max(round(size ** (1 / 3)), cycle_steps)
    at_once = max(1, min(_RESAMPLES, _ELEMENTS_AT_ONCE // size))
    medians = []
    for first in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - first)
        starts = random.integers(0, size, (count, -(-size // block)))
        rows = (starts[:, :, None] + np.arange(block)).reshape(count, -1)[:, :size] % size
        medians.append(np.median(array[rows], axis=1))
    return np.concatenate(medians)
