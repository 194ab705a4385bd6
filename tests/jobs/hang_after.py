"""Trains until one rank is killed from outside; prints the step it is in."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(50, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(4, 50)).sum().backward()
    optimizer.step()
    sys.stdout.write(f"rank {dist.get_rank()} step {step} at {time.monotonic_ns()}\n")
    time.sleep(0.005)
