"""Ranks that the kernel kills for want of memory: `out_of_memory.py CGROUP VICTIMS`.

Rank 0 stays outside of the memory cgroup; the others enter it. After some steps together each in
its turn takes more memory in every step of its own. Prints one JSON line for each: its status
and, as `killed.py` does, what of its steps must be in the trace.
"""

import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from killed import SHARED_BYTES, facts_of_death, note_step, note_writes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOGETHER = 20
BYTES_A_STEP = 1 << 19
MOST_STEPS = 2000  # 1 GB: the job ends here where no memory killer runs


def train(rank, world, store, shared, turn):
    note_writes(shared)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hoard = []
    for step in range(MOST_STEPS if rank else TOGETHER):
        while step >= TOGETHER and turn[0] < rank:
            time.sleep(0.01)
        optimizer.zero_grad()
        if step < TOGETHER:
            model(torch.ones(2, 8)).sum().backward()
        else:
            model.module(torch.ones(2, 8)).sum().backward()
            hoard.append(bytearray(b"x" * BYTES_A_STEP))
        optimizer.step()
        note_step(shared, step)


def main():
    torch.set_num_threads(1)
    cgroup, victims, store = Path(sys.argv[1]), int(sys.argv[2]), tempfile.mktemp()
    notes, rank_of, turn = [], {}, mmap.mmap(-1, 1)
    turn[0] = 1
    for rank in range(victims + 1):
        notes.append(mmap.mmap(-1, SHARED_BYTES))
        child = os.fork()
        if child == 0:
            if rank:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            train(rank, victims + 1, store, notes[rank], turn)
            return
        rank_of[child] = rank
    killed = 0
    while rank_of:
        child, status = os.wait()
        facts = facts_of_death(notes[rank_of[child]])
        status = os.waitstatus_to_exitcode(status)
        rank = rank_of.pop(child)
        print(json.dumps({"rank": rank, "status": status, **facts}), flush=True)
        killed += status != 0
        turn[0] = max(turn[0], rank + 1)
    sys.exit(40 + killed)


if __name__ == "__main__":
    main()
