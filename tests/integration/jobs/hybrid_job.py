"""Trains a model with hybrid sharding on four ranks, two islands of two.

Arguments: a file for the losses of rank 0 as text, and words that change the job. Each rank writes
its shards after each step to the file with its number added.
"""

import socket
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

path, changes = Path(sys.argv[1]), sys.argv[2:]
if "held" in changes:
    fully_shard = partial(fully_shard)
dist.init_process_group("gloo")
rank = dist.get_rank()
hosts = [change for change in changes if change.startswith("hosts=")]
if hosts:
    socket.gethostname = lambda: hosts[0].removeprefix("hosts=")[rank]
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 63), nn.Linear(63, 4)
)
if "flat" in changes:
    mesh = init_device_mesh("cpu", (4,))
elif "unnamed" in changes:
    mesh = init_device_mesh("cpu", (2, 2))
else:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
options = {"reshard_after_forward": 2} if "number" in changes else {}
if "dimensions" in changes:
    dimensions = fsdp.DataParallelMeshDims(shard="shard", replicate="replicate")
    options["dp_mesh_dims"] = dimensions
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh, **options)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, shards = [], []
for step in range(12):
    if "restart" in changes and step == 6:
        saved = optimizer.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.load_state_dict(saved)
    generator = torch.Generator().manual_seed(step * 7 + rank)
    inputs = torch.randn(32, 24, generator=generator)
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
    sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    shards.append([parameter.to_local().detach().clone() for parameter in sharded])
torch.save(shards, f"{path}-{rank}")
if rank == 0:
    path.write_text("\n".join(value.hex() for value in losses))
dist.destroy_process_group()
