"""Remote calls of every kind, without any process group."""

import os
import sys

import torch
from torch.distributed import rpc

import ddltrace


def add(left, right):
    return left + right


def fail():
    raise ValueError("on purpose")


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Counter:
    def __init__(self):
        self.count = 0

    def up(self, by):
        self.count += by
        return self.count


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    if rank == 0:
        with ddltrace.annotate("calls"):
            assert rpc.rpc_sync("worker1", add, (torch.ones(250), 1))[0].item() == 2
            future = rpc.rpc_async("worker1", add, (torch.ones(500), torch.ones(500)))
            assert future.wait()[0].item() == 2
            assert rpc.rpc_sync(1, torch.add, (torch.ones(3), 2))[0].item() == 3
            assert rpc.rpc_sync("worker1", scripted, (torch.ones(4),))[0].item() == 3
            counter = rpc.remote("worker1", Counter)
            assert counter.rpc_sync().up(5) == 5
            assert counter.to_here().count == 5
            failed = False
            try:
                rpc.rpc_sync("worker1", fail)
            except ValueError:
                failed = True
            assert failed
            doubled = rpc.rpc_async("worker1", add, (1, 2)).then(lambda f: 2 * f.value())
            assert doubled.wait() == 6
    rpc.shutdown()
    sys.stdout.write(f"rank {rank} done\n")


if __name__ == "__main__":
    main()
