"""Sends rows unevenly to all ranks, as a router does, while torch.profiler records the calls."""

import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

ROWS = [[1, 5], [7, 2]]
"""Rows from each rank to each rank."""

WIDTH = 16

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
sent, received = ROWS[rank], [rows[rank] for rows in ROWS]
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    for _ in range(3):
        into = torch.empty(sum(received), WIDTH)
        dist.all_to_all_single(into, torch.randn(sum(sent), WIDTH), received, sent)
    dist.all_to_all_single(torch.empty(2, WIDTH), torch.randn(2, WIDTH))
    dist.all_gather_into_tensor(torch.empty(2, WIDTH), torch.randn(1, WIDTH))
profiler.export_chrome_trace(f"{sys.argv[1]}/kineto-{rank}.json")
dist.destroy_process_group()
