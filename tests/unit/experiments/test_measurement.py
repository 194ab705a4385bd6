"""The time of a step of an experiment: `experiments/harness/measurement.py`."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.made_trace import trace_of

from ddltrace.analyzer.importers.imported import Row
from ddltrace.analyzer.open_trace import Trace
from ddltrace.experiments.harness.measurement import _step_times

SEED = random.SystemRandom().randrange(1 << 32)


def trace_of_steps(steps: dict[int, list[tuple[int, int]]]) -> Trace:
    """A trace of the start and end of each step of each rank, ns."""
    return trace_of(
        {
            rank: [
                Row(begin, end, "step", "step", "main", step=number)
                for number, (begin, end) in enumerate(own)
            ]
            for rank, own in steps.items()
        }
    )


def test_a_rank_that_is_ahead_makes_no_step_longer() -> None:
    ahead = [(0, 100), (100, 120), (120, 140), (140, 400)]
    behind = [(0, 100), (100, 200), (200, 300), (300, 400)]
    evaluated = [(5000, 5050)]  # between the steps, the model was evaluated
    trace = trace_of_steps({0: ahead + evaluated, 1: behind + evaluated})
    assert _step_times(trace, range(5)) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.05])


def test_the_times_of_steps_are_together_the_time_of_all() -> None:
    rng = random.Random(SEED)
    for _ in range(30):
        steps: dict[int, list[tuple[int, int]]] = {}
        for rank in range(rng.randrange(1, 5)):
            ends = [0]
            for _ in range(8):
                ends.append(ends[-1] + rng.randrange(1, 1000))
            steps[rank] = list(pairwise(ends))
        found = _step_times(trace_of_steps(steps), range(8))
        assert min(found) >= 0
        last = max(own[-1][1] for own in steps.values())
        assert sum(found) == pytest.approx(last / 1e3), SEED
