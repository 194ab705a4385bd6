"""Trains a sharded model on two ranks; rank 0 writes the losses as text to the first argument."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 64), nn.Linear(64, 4)
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for step in range(12):
    generator = torch.Generator().manual_seed(step * 7 + dist.get_rank())
    inputs = torch.randn(32, 24, generator=generator)
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text("\n".join(value.hex() for value in losses))
dist.destroy_process_group()
# The mesh keeps the group, so that Gloo's threads go on. One of them takes Python's lock to free
# the last message; if the interpreter ends in between, the process aborts.
time.sleep(0.1)
