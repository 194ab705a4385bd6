"""Trains one tensor on each rank; its targets give gradients that a few lines of numpy follow.

The loss is half of the squared distance of the weights to the rank's target of the step, so that
the gradient is weights minus target. Rank 0 writes each strategy's weights at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse

STEPS = 24
SIZE = 12
RATE = 0.05


def target(step: int, rank: int) -> torch.Tensor:
    """What a rank's weights are drawn to in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


class Weights(nn.Module):
    """One tensor, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.arange(SIZE, dtype=torch.float64) / SIZE)

    def forward(self, towards: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.weights - towards).square().sum() / 2
        return loss


def trained(spec: str) -> list[float]:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    exchange = attach(model, parse(spec))
    for step in range(STEPS):
        optimizer.zero_grad()
        exchange.model(target(step, dist.get_rank())).backward()
        optimizer.step()
    found: list[float] = next(iter(model.parameters())).detach().tolist()
    exchange.close()
    return found


def main() -> None:
    dist.init_process_group("gloo")
    found = {spec: trained(spec) for spec in sys.argv[2:]}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
