"""Trains STEPS steps on two ranks; rank 0 prints memory and living objects while it trains.

Each step also does what could make a tracer grow: it sends and receives under a new tag, polls,
copies the model and wraps the copy, makes an optimizer.
"""

import copy
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


def train_a_copy(model):
    copied = DistributedDataParallel(copy.deepcopy(model.module))
    copied(torch.ones(2, 8)).sum().backward()
    torch.optim.SGD(copied.parameters(), lr=0.01).step()


def send_and_receive(step, other):
    sent = dist.isend(torch.ones(2), other, tag=step)
    received = dist.irecv(torch.empty(2), other, tag=step)
    received.wait()
    sent.wait()
    # Waited for by a poll only.
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while not work.is_completed():
        pass


def main():
    steps = int(sys.argv[1])
    torch.set_num_threads(1)
    file = tempfile.mktemp()
    child = os.fork()
    rank = int(child == 0)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
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
        send_and_receive(step, 1 - rank)
        train_a_copy(model)
        # The first tenth fills what has an upper bound.
        if rank == 0 and step in (*range(steps // 10, steps, steps // 10), steps - 1):
            print("memory", resident_kb(), flush=True)
    short_lived = nn.Linear(3, 3)
    short_lived(torch.ones(1, 3)).sum().backward()
    gone = [weakref.ref(short_lived), weakref.ref(short_lived.weight)]
    del short_lived
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        return
    assert os.waitpid(child, 0)[1] == 0
    print("tensors alive", sum(reference() is not None for reference in messages))
    print("modules alive", sum(reference() is not None for reference in gone))


if __name__ == "__main__":
    main()
