"""Two ranks resume strategies from checkpoints, and train on sparse gradients.

Started by test_strategy_checkpoints.py: checkpoint_job.py OUTPUT [SPEC@OPTIMIZER...], with specs on
one rank, where the order of updates on a server is known.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.observation.notes import reported_restrictions
from ddltrace.experiments.strategy.spec import parse

SPECS = (
    "streaming_diloco:period=6,fragments=3,delay=2",
    "streaming_diloco:period=4,fragments=2,delay=3,alpha=1+onebit",
    "diloco:period=4",
    "localsgd:period=3+fp16",
    "postlocalsgd:start=4,period=3",
    "accumulate:steps=3",
    "lamb",
    "demo",
    *("muon", "dion", "noloco:period=4"),
)
STEPS, SAVED = 14, 7


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}


def resumed(spec: str, optimizer_name: str = "adamw") -> dict[str, bool]:
    """Whether a run from a checkpoint ends as the run that went on."""

    def begin(seed: int) -> tuple[Any, Any, Any]:
        model = network(seed)
        # A job wraps its model first and loads the checkpoint of this rank then.
        exchange = attach(model, parse(spec))
        return model, exchange, OPTIMIZERS[optimizer_name](model.parameters())

    def train(exchange: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(50 * step + dist.get_rank())
            optimizer.zero_grad()
            exchange.model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            optimizer.step()

    model, exchange, optimizer = begin(1)
    train(exchange, optimizer, range(SAVED))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(exchange, optimizer, range(SAVED, STEPS))
    exchange.close()
    other, exchange, optimizer = begin(2)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(exchange, optimizer, range(SAVED, STEPS))
    exchange.close()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    plain = OPTIMIZERS[optimizer_name](network(1).parameters())
    plain.load_state_dict(saved[1])
    return {
        "optimizer_state": all(
            plain.state[p] for group in plain.param_groups for p in group["params"]
        ),
        "equal": all(torch.equal(a, b) for a, b in pairs),
        "keys_of_plain_model": list(saved[0]) == list(network(1).state_dict()),
    }


def sparse(spec: str | None) -> tuple[torch.Tensor, list[str]]:
    """An embedding after one update, and what was said of it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = attach(model, parse(spec or "ddp"))
    exchange.model(torch.arange(4) + 3 * dist.get_rank()).square().sum().backward()
    optimizer.step()
    exchange.close()
    return model[0].weight.detach(), reported_restrictions()


class Gated(nn.Module):
    """An embedding that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor, looks_up: bool) -> torch.Tensor:
        features = self.table(rows) if looks_up else torch.ones(len(rows), 4)
        outputs: torch.Tensor = self.head(features)
        return outputs


def gated(spec: str | None) -> torch.Tensor:
    """An embedding that rank 0 does not use in the first step; without a spec on both batches."""
    torch.manual_seed(1)
    model = Gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = None if spec is None else attach(model, parse(spec), find_unused_parameters=True)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2) if exchange is None else [dist.get_rank()]:
            trained: Any = model if exchange is None else exchange.model
            rows = torch.arange(4) + 3 * rank + step
            share = 2 if exchange is None else 1
            (trained(rows, step + rank > 0).square().sum() / share).backward()
        optimizer.step()
    if exchange is not None:
        exchange.close()
    return model.table.weight.detach()


def main() -> None:
    dist.init_process_group("gloo")
    if sys.argv[2:]:
        found = {spec: resumed(*spec.split("@")) for spec in sys.argv[2:]}
        Path(sys.argv[1]).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    report: dict[str, Any] = {"resumed": {spec: resumed(spec) for spec in SPECS}}
    said_before = reported_restrictions()
    plain, _ = sparse(None)
    ours, said = sparse("topk:density=0.1")
    report["sparse"] = {
        "equal_to_ddp": torch.allclose(plain, ours, atol=1e-7),
        "gated": torch.allclose(gated(None), gated("wfbp"), atol=1e-6),
        "said_before": said_before,
        "said": said,
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, report)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
