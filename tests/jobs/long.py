"""Trains STEPS steps in one process; prints memory and living objects as it goes on."""

import gc
import os
import sys
import tempfile
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def resident_kb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def main():
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    file = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    messages = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        sent = torch.ones(64)
        work = dist.all_reduce(sent, async_op=True)
        work.wait()
        dist.all_reduce(sent)
        if step % 100 == 0:
            messages.append(weakref.ref(sent))
        del work, sent
        optimizer.step()
        if step in (steps // 2, steps - 1):
            print("memory", resident_kb())
    short_lived = nn.Linear(3, 3)
    short_lived(torch.ones(1, 3)).sum().backward()
    gone = [weakref.ref(short_lived), weakref.ref(short_lived.weight)]
    del short_lived
    gc.collect()
    print("tensors alive", sum(reference() is not None for reference in messages))
    print("modules alive", sum(reference() is not None for reference in gone))


if __name__ == "__main__":
    main()
