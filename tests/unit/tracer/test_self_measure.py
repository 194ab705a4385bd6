"""The overhead that `CostMeter` reports for generated step times."""

from __future__ import annotations

import pytest

from ddltrace.tracer.capture.overhead_probe import FIRST_STEP, CostMeter
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
