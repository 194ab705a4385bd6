"""Rank 0 trains over RPC: a part of the model on the other rank, an optimizer of each kind."""

import os
import sys

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer


class PythonSGD(torch.optim.SGD):
    """Of a class that PyTorch has no scripted form of: the owners step through its Python code."""


def train(optimizer_class):
    torch.manual_seed(1)
    remote = RemoteModule("worker1/cpu", nn.Linear, args=(4, 6))
    local = nn.Linear(6, 2)
    parameters = [*remote.remote_parameters(), *map(rpc.RRef, local.parameters())]
    optimizer = DistributedOptimizer(optimizer_class, parameters, lr=0.05)
    model = nn.Sequential(remote, local)
    for _ in range(3):
        with autograd.context() as context:
            loss = model(torch.randn(8, 4)).square().mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
    with torch.no_grad():
        remote(torch.zeros(1, 4))


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
    if rank == 0:
        train(torch.optim.SGD)
        train(PythonSGD)
    rpc.shutdown()
    sys.stdout.write(f"rank {rank} done\n")


if __name__ == "__main__":
    main()
