"""One server of a parameter server, as a process: sums what all workers push, and sends it back.

Started by `server_processes.py`; ends when the workers say so, or with the worker that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.transfers import Ownership
from ddltrace.experiments.collectives.job_store import open_store
from ddltrace.experiments.collectives.lifelines import listen
from ddltrace.experiments.collectives.server_processes import END, join_group
from ddltrace.experiments.parent_process import end_with_parent
from ddltrace.experiments.plan_execution import (
    OwnRound,
    PlanExecution,
    launches_of,
    rounds_of,
)
from ddltrace.experiments.transports import by_name
from ddltrace.experiments.transports.backends.meeting import JOIN_SECONDS
from ddltrace.experiments.transports.backends.register import backend_of
from ddltrace.tracer.errors import MissingCapabilityError


def main() -> None:
    """Serves until the workers end."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    end_with_parent(options["parent"])
    # Ctrl-C reaches all processes of a terminal; the workers decide when servers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = open_store(options["store"], options["prefix"])
    rank, size, servers = options["rank"], options["size"], options["servers"]
    workers = size - servers
    listen(store, rank - workers, workers, servers, JOIN_SECONDS).watch(_end_with_workers)
    if options["transport"]:
        backend_of(replace(by_name(options["backend"]), **options["transport"]))
    group = join_group(
        c10d.PrefixStore("group", store),
        rank,
        size,
        options["global_ranks"],
        name=options["name"],
        backend=options["backend"],
    )
    be_a_rank(rank=options["global_ranks"][rank], ranks=max(options["global_ranks"]) + 1)
    architecture = ParameterServer(servers=options["servers"])
    plans: dict[str, tuple[int, list[OwnRound]]] = {}
    number = 0
    while True:
        try:
            text = store.get(f"message/{number}").decode()
        except dist.DistError:
            return  # the store has gone, with the job
        if text == END:
            return
        tag, dtype, keys = json.loads(text)
        same = json.dumps(keys)
        if same not in plans:
            owners = [Ownership(*key) for key in keys]
            plan = (
                *architecture.push(range(size), owners),
                *architecture.pull(range(size), owners),
            )
            plans[same] = (max(owner.stop for owner in owners), rounds_of(rank, plan))
        elements, rounds = plans[same]
        vector = torch.zeros(elements, dtype=getattr(torch, dtype))
        send, receive = launches_of(group, tag)
        PlanExecution(rounds, vector, send=send, receive=receive).wait()
        number += 1


def _end_with_workers(worker: int, said_goodbye: bool) -> None:
    del worker
    if not said_goodbye:
        os._exit(1)  # the sum of the others alone is no use to anybody


def be_a_rank(*, rank: int, ranks: int) -> None:
    """Lets a tracer record this process as a rank after those of the job.

    The default group, from which a tracer takes the rank, sends nothing: the job's ranks have a
    default group of their own that this process cannot join.

    Args:
        rank: What the trace calls this process.
        ranks: Number of the job's ranks and servers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


if __name__ == "__main__":
    with suppress(MissingCapabilityError):  # the workers say it
        main()
