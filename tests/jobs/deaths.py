"""Ranks that each die in a way of their own: `deaths.py WAY...`, one rank for each way.

Prints one JSON line: the exit status of each rank.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def run_out_of_memory():
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(bytearray(1 << 20))


WAYS = {
    "returns": lambda: None,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "os_exit": lambda: os._exit(6),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "out_of_memory": run_out_of_memory,
    "exec": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 8"]),
}


def train(rank, world, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    # What is younger than the writer's period may be lost.
    time.sleep(1.5)


def main():
    torch.set_num_threads(1)
    store, ways = tempfile.mktemp(), sys.argv[1:]
    children = []
    for rank, way in enumerate(ways):
        child = os.fork()
        if child == 0:
            train(rank, len(ways), store)
            WAYS[way]()
            return
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(dict(zip(ways, statuses, strict=True))), flush=True)


if __name__ == "__main__":
    main()
