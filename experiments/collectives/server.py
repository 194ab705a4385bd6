"""One server of a parameter server, as a process: sums what all workers push, and sends it back.

Started by `server_processes.py`; ends when the workers say so, or with the worker that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.transfers import Ownership
from ddltrace.experiments.collectives.lifelines import ServerEnd, listen
from ddltrace.experiments.collectives.server_processes import END, join_group, open_store
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


@dataclass(frozen=True)
class Joined:
    """A server that has joined its workers.

    Attributes:
        options: What the workers have agreed on; see `server_processes.Servers`.
        store: Where workers and servers meet.
        group: Workers, then servers.
        lines: Lifelines to the workers.
    """

    options: dict[str, Any]
    store: c10d.Store
    group: dist.ProcessGroup
    lines: ServerEnd

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.group.size() - int(self.options["servers"])


def join(lost: Callable[[int, bool], None]) -> Joined:
    """Joins the workers that have started this process, and ends with them until then.

    Args:
        lost: As of `ServerEnd.watch`.
    """
    options: dict[str, Any] = json.loads(sys.argv[1])
    end_with_parent(options["parent"])
    # Ctrl-C reaches all processes of a terminal; the workers decide when servers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = open_store(options["store"], options["prefix"])
    rank, names, servers = options["rank"], options["global_ranks"], options["servers"]
    workers = len(names) - servers
    lines = listen(store, rank - workers, workers, servers, JOIN_SECONDS)
    lines.watch(lost)
    if options["transport"]:
        backend_of(replace(by_name(options["backend"]), **options["transport"]))
    group = join_group(
        c10d.PrefixStore("group", store),
        rank,
        names,
        name=options["name"],
        backend=options["backend"],
        timeout=timedelta(seconds=options["timeout_s"]),
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A tracer records this process as a rank after those of the job. The default group, from which
    # it takes the rank, sends nothing: the job's ranks have one that this process cannot join.
    dist.init_process_group("fake", store=FakeStore(), rank=names[rank], world_size=max(names) + 1)
    return Joined(options, store, group, lines)


def main() -> None:
    """Serves until the workers end."""
    joined = join(_end_with_workers)
    rank, size, store = joined.group.rank(), joined.group.size(), joined.store
    architecture = ParameterServer(servers=joined.options["servers"])
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
        send, receive = launches_of(joined.group, tag)
        PlanExecution(rounds, vector, send=send, receive=receive).wait()
        number += 1


def _end_with_workers(worker: int, said_goodbye: bool) -> None:
    del worker
    if not said_goodbye:
        os._exit(1)  # the sum of the others alone is no use to anybody


if __name__ == "__main__":
    with suppress(MissingCapabilityError):  # the workers say it
        main()
