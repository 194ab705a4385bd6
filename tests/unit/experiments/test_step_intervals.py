"""A difference is called clear when it is there, and mostly only then."""

from __future__ import annotations

import numpy as np
import pytest

from ddltrace.experiments.harness.step_intervals import compare_medians


def steps(seed: int, *, scale: float = 1.0, size: int = 50) -> list[float]:
    """Step times of 10 ms with 5 % noise in which neighbours resemble each other."""
    noise = np.random.default_rng(seed).normal(0, 1, size + 1)
    return list(scale * 10_000 * (1 + 0.05 * (noise[1:] + noise[:-1]) / 2**0.5))


def test_a_fifth_less_is_found() -> None:
    difference = compare_medians(steps(1, scale=0.8), steps(2))
    assert difference is not None
    assert difference.is_clear
    assert difference.low < difference.relative < difference.high
    assert difference.low < -0.2 < difference.high


def test_equal_runs_are_seldom_told_apart() -> None:
    differences = [compare_medians(steps(2 * k), steps(2 * k + 1)) for k in range(100)]
    false_alarms = sum(d is not None and d.is_clear for d in differences)
    # 5 expected at 95 %; the bound is the 99.9 % quantile of Binomial(100, 0.05), doubled
    # for the coarse blocks of short series.
    assert false_alarms <= 26
    assert all(d is not None and d.low <= d.high for d in differences)


def test_one_slow_step_changes_nothing() -> None:
    calm = steps(3)
    difference = compare_medians([*calm[:-1], 1e9], calm)
    assert difference is not None
    assert not difference.is_clear
    assert difference.relative == pytest.approx(0, abs=0.02)


def test_too_few_steps_say_nothing() -> None:
    assert compare_medians(steps(1, size=7), steps(2)) is None
    assert compare_medians(steps(1), []) is None
