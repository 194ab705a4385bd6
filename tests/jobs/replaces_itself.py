"""A rank that communicates, replaces itself by exec, and communicates again."""

import os
import sys
import time

import torch
import torch.distributed as dist

round_ = int(sys.argv[1]) if len(sys.argv) > 1 else 0
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.environ['STORES']}/store-{round_}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.barrier()
if round_ == 0:
    time.sleep(1.5)  # like a kill, exec loses what was recorded in the last second
    os.execv(sys.executable, [sys.executable, __file__, "1"])
dist.destroy_process_group()
