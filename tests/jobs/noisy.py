"""Records many events quickly: `noisy.py COUNT` regions in one process."""

import gc
import sys

import torch.distributed as dist

import ddltrace

gc.disable()  # a collection would be an event more
dist.init_process_group("gloo")
count = int(sys.argv[1])
for number in range(count):
    with ddltrace.annotate(f"region {number * 7919 % 100_003}"):
        pass
sys.stdout.write(f"done {count}\n")
