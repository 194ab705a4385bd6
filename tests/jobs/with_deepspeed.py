"""DeepSpeed on the CPU: its engine shards the optimizer's state (ZeRO stage 1) over two ranks."""

import logging
import sys

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

# DeepSpeed compiles an all-reduce over shared memory for CPUs, which takes minutes and bypasses
# torch.distributed. The job uses Gloo instead.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logger.setLevel(logging.ERROR)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
deepspeed.init_distributed(dist_backend="gloo")
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
generator = torch.Generator().manual_seed(engine.global_rank)
for _ in range(4):
    x = torch.randn(8, 10, generator=generator)
    y = torch.randint(0, 2, (8,), generator=generator)
    loss = nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    sys.stdout.write(f"rank {engine.global_rank} loss {loss.item().hex()}\n")
engine.destroy()
torch.distributed.destroy_process_group()
