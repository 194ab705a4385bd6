"""Reinforcement learning in small: two ranks roll out, two train on it and send the weights back.

    two_roles.py PORT PORT PORT

Each role is a job of its own at one of the first two ports, and all meet at the third, as
frameworks for reinforcement learning do it. Each rollout takes 60 ms longer on rank 1 of its role,
each update 30 ms on both trainers.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

ITERATIONS = 6
ROLLOUT_S, UPDATE_S = 0.06, 0.03


def meet(port: str, place: int) -> dist.ProcessGroup:
    """A group beside the job's own, as OpenRLHF creates it to send weights."""
    store = dist.TCPStore("127.0.0.1", int(port), 4, place == 0, timedelta(seconds=60))
    group, _ = distributed_c10d._new_process_group_helper(
        *(4, place, [], dist.Backend("gloo"), dist.PrefixStore("weights", store)),
        group_name="weights",
        timeout=timedelta(seconds=60),
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(4)}
    return group


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = int(os.environ["RANK"])
    trains = place < 2
    os.environ["DDLTRACE_ROLE"] = "trainer" if trains else "rollout"
    address = f"tcp://127.0.0.1:{sys.argv[1 if trains else 2]}"
    dist.init_process_group("gloo", init_method=address, rank=place % 2, world_size=2)
    everyone = meet(sys.argv[3], place)
    model = nn.Linear(256, 256)
    parameters = list(model.parameters())
    if trains:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.empty(32, 256)
    for _ in range(ITERATIONS):
        if not trains:
            with torch.no_grad():
                model(torch.ones(32, 256))
            time.sleep(ROLLOUT_S * (place == 3))
            dist.barrier()
            batch.fill_(0.5)
        dist.broadcast(batch, 2, everyone)
        if trains:
            model(batch).pow(2).mean().backward()
            time.sleep(UPDATE_S)
            optimizer.step()
            optimizer.zero_grad()
        for parameter in parameters:
            dist.broadcast(parameter.data, 0, everyone)
    dist.destroy_process_group()


main()
