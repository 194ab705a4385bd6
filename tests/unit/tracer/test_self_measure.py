"""The overhead that `CostMeter` reports for generated step times."""

from __future__ import annotations

import random

import pytest

from ddltrace.tracer.capture.overhead_probe import FIRST_STEP, CostMeter, cost_text, pooled_cost
from ddltrace.tracer.record.recorder import Recorder

NUM_STEPS = 80


class Job:
    """Takes steps: 10 ms of work, and what recording costs where it is not paused."""

    def __init__(self, cost_ns: int, drift_ns: int = 0) -> None:
        self.now_ns = 0
        self.recorder = Recorder(100)
        self.meter = CostMeter(self.recorder, NUM_STEPS, lambda: self.now_ns)
        self.paused: list[int] = []
        self._cost_ns, self._drift_ns = cost_ns, drift_ns

    def run(self, steps: int) -> None:
        for number in range(steps):
            self.now_ns += 10_000_000 + number * self._drift_ns
            if self.recorder.paused:
                self.paused.append(number)
            else:
                self.now_ns += self._cost_ns
            self.meter.after_step(number)


def test_a_cost_is_found() -> None:
    job = Job(cost_ns=500_000)
    job.run(FIRST_STEP + NUM_STEPS + 20)
    result = job.meter.result()
    assert result is not None
    assert result["ratio"] == pytest.approx(1.05)
    assert result["low"] <= 1.05 <= result["high"]
    assert result["steps"] == NUM_STEPS // 2


def test_a_machine_that_slows_down_is_not_taken_for_a_cost() -> None:
    job = Job(cost_ns=0, drift_ns=20_000)
    job.run(FIRST_STEP + NUM_STEPS + 20)
    result = job.meter.result()
    assert result is not None
    assert result["ratio"] == pytest.approx(1.0, abs=0.005)


def test_only_steps_of_the_window_are_left_out() -> None:
    job = Job(cost_ns=1)
    job.run(FIRST_STEP + NUM_STEPS + 20)
    assert len(job.paused) == NUM_STEPS // 2
    assert min(job.paused) > FIRST_STEP
    assert max(job.paused) < FIRST_STEP + NUM_STEPS
    assert not job.recorder.paused


def test_too_few_steps_give_no_number() -> None:
    job = Job(cost_ns=1)
    job.run(FIRST_STEP + 15)
    assert job.meter.result() is None


def test_ranks_are_pooled_without_a_choice_among_them() -> None:
    costs = [
        {"ratio": 1.03, "low": 1.02, "high": 1.04, "steps": 100},
        {"ratio": 1.00, "low": 0.99, "high": 1.01, "steps": 100},
        {"ratio": 1.00, "low": 0.98, "high": 1.02, "steps": 96},
    ]
    pooled = pooled_cost(costs)
    assert pooled["ratio"] == pytest.approx(1.01)
    assert (pooled["low"], pooled["high"]) == pytest.approx((0.9967, 1.0233), abs=1e-4)
    assert pooled["steps"] == 96
    # An interval of 2.67 % is to become one of 0.2 %: 13.3 times as narrow.
    assert pooled["steps_needed"] == pytest.approx(96 * (0.08 / 3 / 0.002) ** 2, abs=1)
    text = cost_text(costs)
    assert "the mean of 3 ranks (95 % interval 0.9967 to 1.0233; for one of 0.2 %:" in text
    assert f"--measure-cost {2 * pooled['steps_needed']})" in text


def test_a_narrow_interval_needs_no_more_steps() -> None:
    text = cost_text([{"ratio": 1.003, "low": 1.0022, "high": 1.0039, "steps": 1000}])
    assert text == (
        "a step takes 1.0030 times as long with it, the mean of 1 rank "
        "(95 % interval 1.0022 to 1.0039)"
    )


@pytest.mark.parametrize("steps", [320, 1200])
def test_the_needed_steps_follow_from_the_noise(steps: int) -> None:
    draw = random.Random(5)
    now, recorder = 0, Recorder(100)
    meter = CostMeter(recorder, steps, lambda: now)
    for number in range(FIRST_STEP + steps + 1):
        now += int(draw.gauss(20_000_000, 100_000))
        meter.after_step(number)
    cost = meter.result()
    assert cost is not None
    # Noise of 0.5 % a step: 300 steps, if the interval is known exactly.
    assert 100 < pooled_cost([cost])["steps_needed"] < 1000
