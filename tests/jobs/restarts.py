"""Trains; rank 1 fails in its third step of the first attempt.

Each attempt has a store of its own: Gloo in PyTorch 2.13 finds the addresses of the former
attempt in torchrun's, traced or not.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group(
    "gloo",
    init_method=f"file://{sys.argv[1]}-{attempt}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 2 and dist.get_rank() == 1 and attempt == "0":
        sys.exit(9)
dist.destroy_process_group()
