"""Trainers with DDP, whose embedding lives on a server, and a master that starts them by RPC.

The last two ranks are the master and the server, which are in no process group. Usage:
ddp_in_rpc.py OUTPUT, to which trainer N adds .N and writes its final weights.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRAINERS = WORLD - 2


def train(remote, output):
    """Trains on one trainer, called by the master."""
    torch.manual_seed(0)
    dense = DistributedDataParallel(nn.Linear(4, 2))
    parameters = [*remote.remote_parameters(), *map(rpc.RRef, dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        with autograd.context() as context:
            tokens = torch.randint(0, 10, (6,), generator=data)
            offsets = torch.tensor([0, 3])
            loss = dense(remote.forward(tokens, offsets)).square().mean()
            autograd.backward(context, [loss])
            optimizer.step(context)
    weights = [parameter.tolist() for parameter in dense.parameters()]
    Path(f"{output}.{dist.get_rank()}").write_text(json.dumps(weights))


def main():
    torch.set_num_threads(1)
    name = f"ddp-in-rpc-{os.environ['MASTER_PORT']}-{os.getppid()}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.gettempdir()}/{name}")
    names = [*(f"trainer{rank}" for rank in range(TRAINERS)), "master", "server"]
    if RANK < TRAINERS:
        dist.init_process_group("gloo", rank=RANK, world_size=TRAINERS)
    rpc.init_rpc(names[RANK], rank=RANK, world_size=WORLD, rpc_backend_options=options)
    if names[RANK] == "master":
        remote = RemoteModule("server", nn.EmbeddingBag, args=(10, 4), kwargs={"mode": "sum"})
        started = [
            rpc.rpc_async(trainer, train, args=(remote, sys.argv[1]))
            for trainer in names[:TRAINERS]
        ]
        for each in started:
            each.wait()
    rpc.shutdown()


if __name__ == "__main__":
    main()
