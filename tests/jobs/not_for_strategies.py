"""Jobs to which a strategy cannot be applied. Usage: not_for_strategies.py CASE"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = nn.Linear(4, 4)
if sys.argv[1] in {"hook", "join", "lbfgs"}:
    model = DistributedDataParallel(model)
if sys.argv[1] == "hook":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
if sys.argv[1] == "fsdp":
    from torch.distributed.fsdp import fully_shard

    fully_shard(
        model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    )
kind = torch.optim.LBFGS if sys.argv[1] == "lbfgs" else torch.optim.SGD
optimizer = kind(model.parameters(), lr=0.1)


def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss


if sys.argv[1] == "join":
    with model.join():
        optimizer.step(closure)
for _ in range(20):
    optimizer.step(closure)
    sys.stdout.write("trained\n")
