"""A job of two ranks that sends messages of every form over NCCL while the profiler looks on.

Started once for each rank, with the variables of ``torchrun``; the first argument is a folder, in
which each rank leaves the profiler's file and a pair of clocks, the others are forms to leave out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

ELEMENTS = 4 << 20
WARM_UP = 2
ROUNDS = 6


def forms(rank: int) -> dict[str, Callable[[], object]]:
    """What is sent, by name; every function leaves its results unused."""
    peer = 1 - rank
    data = torch.ones(ELEMENTS, device="cuda")
    halves = [torch.empty(ELEMENTS, device="cuda") for _ in range(2)]
    whole = torch.empty(2 * ELEMENTS, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda")
    group = dist.group.WORLD
    assert group is not None

    def asynchronous() -> None:
        works = []
        for _ in range(4):
            torch.mm(matrix, matrix)
            works.append(dist.all_reduce(data, async_op=True))
        torch.mm(matrix, matrix)
        for work in works:
            work.wait()

    def gathered_while_computing() -> None:
        work = dist.all_gather_into_tensor(whole, data, async_op=True)
        for _ in range(8):
            torch.mm(matrix, matrix)
        work.wait()

    def blocking() -> None:
        dist.all_reduce(data)
        dist.broadcast(data, 0)
        dist.reduce_scatter_tensor(data, whole)
        dist.all_gather(halves, data)

    def one_to_one() -> None:
        if rank:
            dist.recv(data, peer)
            dist.send(data, peer)
        else:
            dist.send(data, peer)
            dist.recv(data, peer)

    def in_a_batch() -> None:
        both = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, halves[0], peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def coalesced() -> None:
        with dist._coalescing_manager(group, device=data.device, async_ops=True) as manager:
            for half in halves:
                dist.all_reduce(half)
        manager.wait()

    def functional_collective() -> None:
        functional.wait_tensor(functional.all_reduce(data, "sum", group))

    def late() -> None:
        if rank:
            time.sleep(0.005)
        dist.all_reduce(data, async_op=True).wait()

    layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    inputs = torch.randn(64, 1024, device="cuda")

    def sharded() -> None:
        layers(inputs).sum().backward()

    return {
        function.__name__: function
        for function in (
            *(asynchronous, gathered_while_computing, blocking, one_to_one, in_a_batch),
            *(coalesced, functional_collective, late, sharded),
        )
    }


def main(folder: Path, left_out: list[str]) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    made = forms(rank)

    def run(rounds: int) -> None:
        for _ in range(rounds):
            for name, function in made.items():
                if name in left_out:
                    continue
                with record_function(f"form: {name}"):
                    function()
                torch.cuda.synchronize()

    run(WARM_UP)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(ROUNDS)
        clock = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
    profiler.export_chrome_trace(str(folder / f"kineto-{rank}.json"))
    (folder / f"clock-{rank}.json").write_text(json.dumps(clock), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
