"""A DDP job that profiles some of its own steps with torch.profiler and exports what it saw."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

FIRST, LAST = 5, 25

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU()]
layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 256, 100)]
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
profiler = profile(activities=[ProfilerActivity.CPU])
for step in range(LAST + 5):
    if step == FIRST:
        profiler.start()
    optimizer.zero_grad()
    model(torch.randn(16, 3, 16, 16)).square().mean().backward()
    dist.all_reduce(torch.ones(1000))
    optimizer.step()
    if step == LAST - 1:
        profiler.stop()
profiler.export_chrome_trace(f"{sys.argv[1]}/kineto-{dist.get_rank()}.json")
dist.destroy_process_group()
