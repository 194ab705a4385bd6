"""A difference is called clear when it is there, and mostly only then."""

from __future__ import annotations

import numpy as np
import pytest

from ddltrace.experiments.harness.step_intervals import (
    Difference,
    Timed,
    compare_medians,
    compare_rounds,
    means_over_cycles,
    speedup,
    step_time,
)


def steps(seed: int, *, scale: float = 1.0, size: int = 50) -> list[float]:
    """Step times of 10 ms with 5 % noise in which neighbours resemble each other."""
    noise = np.random.default_rng(seed).normal(0, 1, size + 1)
    return list(scale * 10_000 * (1 + 0.05 * (noise[1:] + noise[:-1]) / 2**0.5))


def test_a_fifth_less_is_found() -> None:
    difference = compare_medians(steps(1, scale=0.8), steps(2))
    assert difference is not None
    assert not difference.is_clear  # of one run each, which decides nothing
    assert difference.low < difference.relative < difference.high < 0
    assert difference.low < -0.2 < difference.high


def test_equal_runs_are_seldom_told_apart() -> None:
    differences = [compare_medians(steps(2 * k), steps(2 * k + 1)) for k in range(100)]
    false_alarms = sum(d is not None and (d.low > 0 or d.high < 0) for d in differences)
    # 5 expected at 95 %; the bound is the 99.9 % quantile of Binomial(100, 0.05), doubled
    # for the coarse blocks of short series.
    assert false_alarms <= 26
    assert all(d is not None and d.low <= d.high for d in differences)


def test_one_slow_step_changes_nothing() -> None:
    calm = steps(3)
    difference = compare_medians([*calm[:-1], 1e9], calm)
    assert difference is not None
    assert difference.low < 0 < difference.high
    assert difference.relative == pytest.approx(0, abs=0.02)


def test_too_few_steps_say_nothing() -> None:
    assert compare_medians(steps(1, size=7), steps(2)) is None
    assert compare_medians(steps(1), []) is None


def in_rounds(*scales: float) -> Timed:
    return Timed({n: steps(40 + n, scale=scale) for n, scale in enumerate(scales, 1)})


def only(timed: Timed, *rounds: int) -> Timed:
    return Timed({number: timed.rounds[number] for number in rounds})


def test_a_drift_between_rounds_cancels_out() -> None:
    # Each round is much slower than the one before; in all of them A takes 10 % less than B.
    faster = compare_rounds(in_rounds(0.9, 1.8, 2.7, 3.6), in_rounds(1, 2, 3, 4))
    assert faster is not None
    assert faster.over == "rounds"
    assert faster.relative == pytest.approx(-0.1, abs=1e-9)
    assert faster.is_clear


def test_a_win_within_the_noise_of_rounds_is_marked() -> None:
    # Faster in two rounds, slower in one: within one run each of these differences is clear.
    unsure = compare_rounds(in_rounds(0.8, 0.9, 1.2), in_rounds(1, 1, 1))
    assert unsure is not None
    assert not unsure.is_clear
    assert speedup(unsure, "ddp").verdict == "noise"


def test_a_difference_is_over_all_rounds_of_both_rows() -> None:
    """While a round runs, some rows have it: none is compared by a part of what its row shows."""
    left, right = in_rounds(0.9, 0.9, 0.9), in_rounds(1, 1)
    found = compare_rounds(left, right)
    assert found is not None
    assert found.over == "rounds"
    expected = step_time(left).us / step_time(right).us - 1  # type: ignore[union-attr]
    assert found.relative == pytest.approx(expected, abs=0.002)
    one = compare_rounds(only(left, 2), only(right, 1))
    assert one is not None
    assert one.over == "steps"
    assert not one.is_clear
    three_to_one = compare_rounds(left, only(right, 1))
    assert three_to_one is not None
    assert three_to_one.over == "rounds"
    assert compare_rounds(left, Timed({})) is None


def test_rounds_are_never_more_alike_than_equal_runs_are_known_to_be() -> None:
    flat = {number: [10_000.0] * 9 for number in (1, 2, 3)}
    longer = {number: [10_300.0] * 9 for number in (1, 2, 3)}
    found = compare_rounds(Timed(longer), Timed(flat))
    assert found is not None
    assert found.relative == pytest.approx(0.03)
    assert found.low < 0 < found.high
    assert found.is_decided  # a difference of 10 % is ruled out
    assert not found.is_clear


def test_the_interval_of_rounds_is_students() -> None:
    # Medians 1, 2 and 3: mean 2, standard error 1 / sqrt(3), t = 4.303 with 2 degrees of freedom.
    time = step_time(Timed({1: [1.0], 2: [2.0], 3: [3.0]}))
    assert time is not None
    assert (time.us, time.over, time.rounds) == (2.0, "rounds", 3)
    assert time.high_us == pytest.approx(2 + 4.303 / 3**0.5, rel=1e-3)
    assert time.low_us == pytest.approx(2 - 4.303 / 3**0.5, rel=1e-3)


def test_one_round_has_the_interval_of_its_steps() -> None:
    time = step_time(Timed({1: steps(1)}))
    assert time is not None
    assert time.over == "steps"
    assert time.low_us is not None
    assert time.high_us is not None
    assert time.low_us < time.us < time.high_us
    assert step_time(Timed({1: []})) is None


def test_a_speedup_turns_the_interval_around() -> None:
    found = speedup(Difference(-0.2, -0.5, 0.25), "ddp")
    assert (found.ratio, found.low, found.high) == pytest.approx((1.25, 0.8, 2.0))
    assert found.verdict == "noise"
    assert speedup(Difference(-0.2, -0.3, -0.1, over="rounds"), "ddp").verdict == "faster"
    assert speedup(Difference(0.2, 0.1, 0.3, over="rounds"), "ddp").verdict == "slower"
    assert speedup(Difference(0.2, 0.1, 0.3, over="steps"), "ddp").verdict == "noise"


def test_the_step_of_a_periodic_strategy_contains_its_exchange() -> None:
    # Three local steps of 10 ms, then one with an exchange of 80 ms: 30 ms on average. The window
    # may begin anywhere in the cycle, and one slow step changes nothing.
    cycle = [10_000.0, 10_000.0, 10_000.0, 90_000.0]
    walls = [*(6 * cycle)[1:], 1e9]
    assert means_over_cycles(walls[:-1], 4) == pytest.approx([30_000.0] * 20)
    local, plain = Timed({1: walls}, 4), Timed({1: [60_000.0] * 24})
    time = step_time(local)
    assert time is not None
    assert (time.us, time.low_us) == pytest.approx((30_000.0, 30_000.0))
    found = compare_rounds(local, plain)
    assert found is not None
    assert found.relative == pytest.approx(-0.5)
    two = Timed({1: walls[:-1], 2: walls[:-1]}, 4)
    in_rounds = compare_rounds(two, Timed({1: [60_000.0], 2: [60_000.0]}))
    assert in_rounds is not None
    assert in_rounds.relative == pytest.approx(-0.5)


def test_less_than_two_cycles_have_no_interval() -> None:
    walls = [10_000.0] * 15
    time = step_time(Timed({1: walls}, 8))
    assert time is not None
    assert (time.us, time.low_us) == (10_000.0, None)
    assert compare_rounds(Timed({1: walls}, 8), Timed({1: walls})) is None
    # Less than one cycle: the mean of all steps.
    assert means_over_cycles([1.0, 2.0, 6.0], 8).tolist() == [3.0]
