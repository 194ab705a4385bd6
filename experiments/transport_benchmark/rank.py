"""One rank of the comparison: times one transport; rank 0 writes the results.

Started on every rank by torchrun or by `ddltrace.experiments.network.launch`::

    torchrun --nproc-per-node 2 -m ddltrace.experiments.transport_benchmark.rank \\
        --transport zmq --sizes 4,1024 --rounds 100 --output zmq.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.plan_execution import (
    OwnRound,
    PlanExecution,
    launches_of,
    rounds_of,
)
from ddltrace.experiments.transports import read
from ddltrace.experiments.transports.backends.register import backend_of
from ddltrace.experiments.transports.protocols import protocol_of_job
from ddltrace.tracer.errors import DdltraceError

_WARMUP: Final = 3
_BYTES_A_SIZE: Final = 64 << 20
"""Approximate bytes that a size moves in all its rounds: larger messages get fewer rounds."""
_MIN_ROUNDS: Final = 5


def main() -> None:
    """Measures all operations at all sizes."""
    options = _parse_options()
    _, transport = read(options.transport)
    dist.init_process_group("gloo")
    try:
        everyone = list(range(dist.get_world_size()))
        group = dist.new_group(everyone, backend=backend_of(transport))
        rows = []
        for operation, run in _OPERATIONS.items():
            for size in map(int, options.sizes.split(",")):
                elements = max(1, size // 4)
                device = "cuda" if transport.device == "cuda" else "cpu"
                tensor = torch.ones(elements, device=device)
                rounds = max(_MIN_ROUNDS, min(options.rounds, _BYTES_A_SIZE // size))
                rows.append(
                    {
                        "operation": operation,
                        "bytes": elements * 4,
                        **_measure(functools.partial(run, tensor, group), rounds),
                    }
                )
        if dist.get_rank() == 0:
            measured = {"points": rows, "planned": _planned()}
            options.output.write_text(json.dumps(measured), encoding="utf-8")
    except DdltraceError as error:
        if dist.get_rank() == 0:
            options.output.write_text(json.dumps({"error": str(error)}), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _planned() -> dict[str, Any] | None:
    """The planned and measured times of the messages that a profile paced."""
    if protocol_of_job() is None:
        return None
    from ddltrace.experiments.transports.backends.paced_group import received

    return received.to_json()


def ping_pong(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A round trip between ranks 0 and 1."""
    rank = dist.get_rank(group)
    if rank == 0:
        dist.send(tensor, group=group, group_dst=1)
        dist.recv(tensor, group=group, group_src=1)
    elif rank == 1:
        dist.recv(tensor, group=group, group_src=0)
        dist.send(tensor, group=group, group_dst=0)


def push_pull(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Workers push to rank 0 and pull the sum."""
    if dist.get_rank(group) != 0:
        dist.isend(tensor, group=group, group_dst=0).wait()  # type: ignore[union-attr]
        dist.irecv(tensor, group=group, group_src=0).wait()  # type: ignore[union-attr]
        return
    workers = range(1, group.size())
    pushed = [torch.empty_like(tensor) for _ in workers]
    receives = [
        dist.irecv(into, group=group, group_src=worker)
        for worker, into in zip(workers, pushed, strict=True)
    ]
    total = torch.zeros_like(tensor)
    for receive, into in zip(receives, pushed, strict=True):
        receive.wait()  # type: ignore[union-attr]
        total += into
    for send in [dist.isend(total, group=group, group_dst=worker) for worker in workers]:
        send.wait()  # type: ignore[union-attr]


def ring_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Executes the plan of the architecture ``ring``."""
    send, receive = launches_of(group, tag=0)
    rounds = _ring_rounds(dist.get_rank(group), group.size(), tensor.numel())
    PlanExecution(rounds, tensor, send=send, receive=receive).wait()


@functools.cache
def _ring_rounds(rank: int, ranks: int, elements: int) -> list[OwnRound]:
    return rounds_of(rank, Ring().plan(range(ranks), elements))


_OPERATIONS: Final[dict[str, Callable[[torch.Tensor, dist.ProcessGroup], None]]] = {
    "ping_pong": ping_pong,
    "push_pull": push_pull,
    "all_reduce": ring_all_reduce,
}


def _measure(run: Callable[[], None], rounds: int) -> dict[str, float | int]:
    """Times the rounds of one operation and size.

    Returns:
        The median time on rank 0 (us) and the processor time per round over all ranks (us).
    """
    for _ in range(_WARMUP):
        run()
    dist.barrier()
    times = []
    busy = time.process_time()
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    busy_us = torch.tensor([(time.process_time() - busy) * 1e6], dtype=torch.float64)
    dist.all_reduce(busy_us)
    return {
        "us": statistics.median(times),
        "cpu_us": float(busy_us) / rounds,
        "rounds": rounds,
    }


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one rank of the comparison of transports")
    parser.add_argument("--transport", required=True)
    parser.add_argument("--sizes", required=True, help="bytes, separated by commas")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
