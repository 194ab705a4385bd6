"""Communicates by a process group that is written in Python, or as that would by Gloo's own.

``python_groups.py gloo|backend|handles|blocking|inner``
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]

# Names that newer versions of PyTorch call, and those that backends have had for long.
OF_OLD = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
METHODS = [
    *("allreduce", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter"),
    *("barrier", "send", "recv", "recv_anysource", "allreduce_coalesced"),
    *(*OF_OLD, *OF_OLD.values()),
]


class Ticket(dist.Work):
    """A handle in Python."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        return bool(self.inner.wait())

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())

    def get_future(self) -> Any:
        return self.inner.get_future()

    def _source_rank(self) -> int:
        return int(self.inner._source_rank())


def by_inner(name: str) -> Any:
    """A method that leaves it to the group's inner one."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        work = getattr(self.inner, OF_OLD.get(name, name))(*args, **options)
        if HOW == "handles":
            return Ticket(work)
        if HOW == "blocking" and name not in {"send", "recv", "recv_anysource"}:
            work.wait()  # of Gloo's sends and receives there is only one wait
        return work

    method.__name__ = name
    return method


class Mine(dist.ProcessGroup):
    """A process group in Python."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner = inner

    locals().update({method: by_inner(method) for method in METHODS})

    def getBackendName(self) -> str:
        return "mine"


def create(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    """What PyTorch makes the group with."""
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if HOW != "inner":
        return Mine(backend, rank, size)
    inner = dist.ProcessGroup(store, rank, size)
    inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    inner._set_group_name("inner")
    return Mine(inner, rank, size)


def communicate(rank: int) -> list[torch.Tensor]:
    """Every method, with tensors of other sizes each."""
    results = [torch.full((5,), rank + 1.0)]
    dist.all_reduce(results[0])
    work = dist.all_reduce(results[0], async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    work.wait()
    results.append(torch.full((7,), float(rank)))
    dist.broadcast(results[-1], 1)
    dist.reduce(results[-1], 1)
    results += [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(results[-2:], torch.full((2,), rank + 3.0, dtype=torch.float64))
    mine = torch.full((3,), rank + 5.0)
    others = [torch.zeros(3) for _ in range(2)] if rank == 1 else None
    dist.gather(mine, others, 1)
    results += others or []
    dist.scatter(mine, [torch.full((3,), 8.0), mine.clone()] if rank == 0 else None, 0)
    results += [mine, torch.zeros(8), torch.zeros(6), torch.zeros(3)]
    dist.all_gather_into_tensor(results[-3], torch.full((4,), rank + 1.0))
    dist.all_to_all_single(results[-2], torch.arange(6.0) + rank, [3, 3], [3, 3])
    dist.reduce_scatter_tensor(results[-1], torch.arange(6.0) * (rank + 1))
    if rank == 0:
        dist.send(torch.full((9,), 2.0), 1, tag=3)
        dist.send(torch.full((9,), 4.0), 1)
    else:
        results += [torch.zeros(9), torch.zeros(9)]
        dist.recv(results[-2], 0, tag=3)
        assert dist.recv(results[-1]) == 0
    dist.barrier()
    return results


def train() -> list[torch.Tensor]:
    """Some steps with several buckets."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.Linear(50, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 40)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    """Runs."""
    if HOW == "gloo":
        dist.init_process_group("gloo")
    else:
        dist.Backend.register_backend("mine", create, devices=["cpu"])
        dist.init_process_group("mine")
    rank = dist.get_rank()
    values = [value for result in communicate(rank) for value in result.tolist()]
    for value in [*values, *(loss.item() for loss in train())]:
        sys.stdout.write(f"rank {rank} loss {float(value).hex()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
