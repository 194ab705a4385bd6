"""Steps of a training are counted as the trace counts them."""

from __future__ import annotations

import torch

from ddltrace.experiments.observation.step_count import StepCount


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def test_a_step_has_one_update_of_each_optimizer() -> None:
    count = StepCount()
    one, other = optimizer(), optimizer()
    assert [count.begins(each) for each in (one, other, one, other, one)] == [
        *(True, False, True, False, True)
    ]
    # Several updates of one for each of the other are steps of their own.
    assert [count.begins(each) for each in (one, one, other, one)] == [True, True, False, True]


def test_a_later_phase_with_its_own_optimizer_counts_on() -> None:
    count = StepCount()
    former = optimizer()
    assert count.begins(former)
    del former
    later = optimizer()
    assert [count.begins(later) for _ in range(3)] == [True, True, True]
