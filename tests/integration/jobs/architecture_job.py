"""Ranks train under every architecture; rank 0 writes how far each is from DDP.

Started by test_architectures.py: torchrun architecture_job.py OUTPUT SPEC...
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse

STEPS = 3


def train(spec: str) -> torch.Tensor:
    """The parameters after a few steps, flat."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 1), nn.Linear(1, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = attach(model, parse(spec))
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        exchange.model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    exchange.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    report = {}
    for spec in sys.argv[2:]:
        codec = [part for part in spec.split("+") if part.split(":")[0] in CODECS]
        expected = train("+".join(["ddp", *codec]))
        result = train(spec)
        every = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(every, result)
        report[spec] = {
            "distance": float((result - expected).abs().max()),
            "replicas_equal": all(torch.equal(every[0], other) for other in every),
        }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


CODECS = ("topk", "feedback", "bf16", "powersgd", "randomk")


if __name__ == "__main__":
    main()
