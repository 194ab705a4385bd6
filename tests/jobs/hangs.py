"""Trains three steps, then hangs in the way that its first argument names.

A second one has it do so in another thread than the main one.
"""

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WORKING_STEPS = 3


class Slow(Dataset):
    """The last rank's storage goes away after some batches."""

    def __init__(self, stuck):
        self.stuck = stuck

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if self.stuck and index >= WORKING_STEPS:
            time.sleep(1000)
        return torch.full((10,), float(index))


def write_checkpoint():
    time.sleep(1000)


def main():
    how = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    odd_one = rank == world - 1
    model = DistributedDataParallel(nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = [dist.new_group(list(range(world))) for _ in range(2)]
    loader = DataLoader(Slow(how == "loader" and odd_one), batch_size=1)
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        if step == WORKING_STEPS and how == "in_backward" and odd_one:
            write_checkpoint()
        model(batch).sum().backward()
        optimizer.step()
        if step < WORKING_STEPS - 1:
            continue
        if how == "skip":
            if odd_one:
                write_checkpoint()
            dist.all_reduce(torch.ones(7))
        elif how == "order":
            for group in reversed(pairs) if odd_one else pairs:
                dist.all_reduce(torch.ones(7), group=group)
        elif how == "operation":
            if odd_one:
                dist.all_gather_into_tensor(torch.ones(7 * world), torch.ones(7))
            else:
                dist.broadcast(torch.ones(7), src=world - 1)
                dist.all_reduce(torch.ones(7))
        elif how == "recv" and rank == 0:
            dist.recv(torch.ones(7), world - 1, tag=3)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
    else:
        main()
