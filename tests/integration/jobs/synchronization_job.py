"""Trains a small model under several rules of synchronization. Usage: JOB OUTPUT SPEC...

Rank 1 waits in some steps, so that the others run ahead.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse

STEPS = 8


def train(spec, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    exchange = attach(model, parse(spec))
    optimizer = (
        torch.optim.Adam(model.parameters(), lr=0.01)
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        loss = exchange.model(inputs).square().mean()
        loss.backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        rates.step()
        if dist.get_rank() == 1 and step % 2:
            time.sleep(0.01)
    exchange.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), float(loss)


torch.set_num_threads(1)
dist.init_process_group("gloo")
report = {}
for text in sys.argv[2:]:
    spec, _, kind = text.partition("@")
    reference, _ = train("ddp", kind)
    own, loss = train(spec, kind)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    report[text] = {
        "distance": float((own - reference).abs().max()),
        "equal": all(torch.equal(own, other) for other in everyone),
        "loss": loss,
    }
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(report))
dist.destroy_process_group()
