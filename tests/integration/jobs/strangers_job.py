"""Trains under a strategy while strangers have time to come. Usage: JOB OUTPUT [SPEC]

Rank 1 connects late everywhere, so that each port of rank 0 stays open for a while; OUTPUT gets the
weights of rank 0. Without a strategy, DDP trains.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.transports.backends import listening, meeting
from ddltrace.tracer.connections import proof
from ddltrace.tracer.timing import clock_exchange

LATE_S = 0.7
STEPS = 12


def late(function):
    """The same, but after a pause."""

    def call(*arguments, **options):
        time.sleep(LATE_S)
        return function(*arguments, **options)

    return call


if os.environ["RANK"] == "1":
    # Before the modules of the transports take them from here.
    meeting.connect_proven = late(proof.connect_proven)
    meeting.exchange_lines = late(meeting.exchange_lines)
    listening.listening_ports = late(listening.listening_ports)
    clock_exchange.connect_proven = late(proof.connect_proven)

torch.manual_seed(0)
torch.set_num_threads(1)
os.environ["MASTER_PORT"] = os.environ["STORE_PORT"]
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 3))
exchange = attach(model, parse(sys.argv[2] if len(sys.argv) > 2 else "ddp"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(STEPS):
    optimizer.zero_grad()
    exchange.model(torch.randn(8, 6, generator=data)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
exchange.close()
if dist.get_rank() == 0:
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    Path(sys.argv[1]).write_bytes(weights.numpy().tobytes())
dist.destroy_process_group()
