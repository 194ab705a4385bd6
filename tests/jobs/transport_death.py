"""Rank 1 ends without a word while rank 0 waits for it. Usage: transport_death.py TRANSPORT"""

import os
import sys

import torch
import torch.distributed as dist

from ddltrace.experiments.transports import read
from ddltrace.experiments.transports.backends.register import backend_of

dist.init_process_group("gloo")
group = dist.new_group([0, 1], backend=backend_of(read(sys.argv[1])[1]))
numbers = torch.ones(1000)
dist.all_reduce(numbers, group=group)
# Otherwise rank 1 could end before its last message of the all-reduce has left.
dist.barrier()
if dist.get_rank() == 1:
    os._exit(0)
try:
    dist.recv(numbers, group=group, group_src=1)
except RuntimeError as error:
    sys.stdout.write(f"reported: {error}\n")
sys.stdout.flush()
os._exit(0)
