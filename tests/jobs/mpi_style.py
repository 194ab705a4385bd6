"""Takes its rank from the environment of an MPI-like launcher and passes it on itself."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NAMES = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpich": ("PMI_RANK", "PMI_SIZE"),
}
torch.set_num_threads(1)
rank, size = (int(os.environ[name]) for name in NAMES[os.environ["STYLE"]])
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=rank, world_size=size
)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
