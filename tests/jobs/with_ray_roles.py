"""Ray: two trainers and two rollout workers, each role a job of its own; the driver waits for both.

    with_ray_roles.py PORT PORT PORT

The roles meet at the third port to send weights. Generating takes a worker 60 or 120 ms, in turns.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

ITERATIONS = 6
GENERATE_S = 0.06


class Member:
    """One process of a role."""

    def __init__(self, rank: int, port: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        self.rank = rank
        self.model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.parameters = list(self.model.parameters())

    def meet(self, port: str, place: int) -> None:
        store = dist.TCPStore("127.0.0.1", int(port), 4, place == 0, timedelta(seconds=60))
        self.weights, _ = distributed_c10d._new_process_group_helper(
            *(4, place, [], dist.Backend("gloo"), dist.PrefixStore("weights", store)),
            group_name="weights",
            timeout=timedelta(seconds=60),
        )
        distributed_c10d._world.pg_group_ranks[self.weights] = {rank: rank for rank in range(4)}

    def synchronize(self) -> None:
        for parameter in self.parameters:
            dist.broadcast(parameter.data, 0, self.weights)

    def close(self) -> None:
        dist.destroy_process_group()


class Trainer(Member):
    def __init__(self, rank: int, port: str) -> None:
        super().__init__(rank, port)
        self.model = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self, batch: torch.Tensor) -> float:
        loss = self.model(batch).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class RolloutWorker(Member):
    @torch.no_grad()
    def generate(self, number: int) -> torch.Tensor:
        batch = torch.ones(8, 64)
        end = time.monotonic() + GENERATE_S * (1 + (number + self.rank) % 2)
        while time.monotonic() < end:
            batch = self.model(batch)
        dist.barrier()
        return batch


if __name__ == "__main__":
    ports = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # socket paths must be short
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=os.path.join(folder, "ray"),
        )
        trainer: Any = ray.remote(Trainer)
        worker: Any = ray.remote(RolloutWorker)
        trainers = [trainer.remote(rank, ports[0]) for rank in range(2)]
        workers = [worker.remote(rank, ports[1]) for rank in range(2)]
        everyone = [*trainers, *workers]
        ray.get([each.meet.remote(ports[2], place) for place, each in enumerate(everyone)])
        for number in range(ITERATIONS):
            batches = ray.get([each.generate.remote(number) for each in workers])
            parts = zip(trainers, batches, strict=True)
            losses = ray.get([each.train.remote(batch) for each, batch in parts])
            for rank, loss in enumerate(losses):
                print(f"rank {rank} loss {loss.hex()}")
            ray.get([each.synchronize.remote() for each in everyone])
        ray.get([each.close.remote() for each in everyone])
        ray.shutdown()
