"""The optimizer on a server: its state goes into checkpoints and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddltrace.experiments.asynchrony.server_optimizer import ServerOptimizer
from ddltrace.experiments.asynchrony.wire_format import read_states, write_states


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("NAdam", {"lr": 0.1}),
    ],
)
def test_the_state_travels(name: str, settings: dict[str, Any]) -> None:
    gradients = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([4.0])]
    values = [[torch.ones(3), torch.ones(1)] for _ in range(3)]
    went_on, stopped, resumed = (
        ServerOptimizer(name, [settings], each, [0, 0], rate_factor=0.5) for each in values
    )
    for _ in range(2):
        went_on.update(gradients)
        stopped.update(gradients)
    resumed.load(read_states(write_states(stopped.state())))
    for value, saved in zip(values[2], values[1], strict=True):
        value.copy_(saved)
    went_on.update(gradients)
    resumed.update(gradients)
    for expected, found in zip(values[0], values[2], strict=True):
        assert torch.equal(expected, found)


def test_an_optimizer_without_state_sends_nothing() -> None:
    plain = ServerOptimizer("SGD", [{"lr": 0.1}], [torch.ones(2)], [0], rate_factor=1.0)
    plain.update([torch.ones(2)])
    assert write_states(plain.state()).numel() == 0
    assert read_states(write_states(plain.state())) == []
