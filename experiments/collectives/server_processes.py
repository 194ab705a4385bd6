"""Servers of a parameter server: processes beside the workers, and the group of both.

Worker s starts server s (modulo the number of workers), so servers are spread over the hosts.
Workers and servers meet at the job's own store. There the first worker also announces to the
servers what the workers push next; the data itself is sends and receives in a group of its own, in
which the servers come after the workers.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddltrace.experiments.architectures.transfers import Ownership
from ddltrace.experiments.collectives.job_store import open_store, store_address
from ddltrace.experiments.collectives.lifelines import connect, say_server_died
from ddltrace.experiments.transports import NAMES as TRANSPORTS
from ddltrace.experiments.transports import by_name
from ddltrace.experiments.transports.backends.meeting import JOIN_SECONDS
from ddltrace.experiments.transports.backends.register import backend_of, registered

END: Final = "end"
"""The announcement that ends a server."""

_LIBRARY_BACKENDS: Final = ("gloo", "nccl")
"""Backends of the workers' group beside which the servers' group is one of Gloo."""

_KEPT: Final = 2048
"""Number of announcements kept in the store, more than are ever in progress."""
_PATIENCE: Final = timedelta(minutes=5)
_GRACE_SECONDS: Final = 10.0


def join_group(
    store: c10d.Store,
    rank: int,
    size: int,
    global_ranks: Sequence[int],
    *,
    name: str,
    backend: str = "gloo",
    timeout: timedelta = _PATIENCE,
) -> dist.ProcessGroup:
    """The group of workers and servers, outside of the job's own groups.

    Args:
        store: The store through which workers and servers connect.
        rank: Rank of this process in the group.
        size: Workers and servers.
        global_ranks: Their ranks in the trace.
        name: From `group_name`.
        backend: ``gloo``, or a transport that is a backend of its own.
        timeout: Longest time that a message may take.
    """
    own = next((name for name in TRANSPORTS if backend == by_name(name).backend), "gloo")
    if own in _LIBRARY_BACKENDS:
        group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    else:
        transport = registered(own) or by_name(own)
        creator = dist.Backend._plugins[backend_of(transport).upper()].creator_fn
        group = creator(store, rank, size, timeout)
    group._set_group_name(c10d.GroupName(name))
    group._set_group_desc(f"ddltrace:{name}")
    # `isend` and the trace ask the register for the ranks and the backend of a group.
    world = dist.distributed_c10d._world
    world.pg_group_ranks[group] = {
        global_rank: place for place, global_rank in enumerate(global_ranks)
    }
    world.pg_map[group] = (own, store)
    return group


def wait_or_kill(servers: Iterable[subprocess.Popen[bytes]]) -> None:
    """Waits until servers have ended, and kills those that take too long."""
    for process in servers:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def server_ranks(servers: int) -> list[int]:
    """The ranks in the trace of servers that are about to start: after all others of the job.

    To be called on one rank.

    Args:
        servers: Number of servers. A job has several sets of them if it trains several models.
    """
    store = c10d._get_default_store()
    first = dist.get_world_size() + store.add("ddltrace/servers", servers) - servers
    return list(range(first, first + servers))


def group_name(servers: Sequence[int]) -> str:
    """The name in the trace of the group of workers and servers, on a worker.

    Args:
        servers: From `server_ranks`.
    """
    number = servers[0] - dist.get_world_size()
    return "parameter server" + (f" from rank {servers[0]}" if number else "")


class ServerProcesses:
    """The servers of one group of workers.

    Attributes:
        group: Workers, then servers.
    """

    def __init__(self, workers: dist.ProcessGroup, servers: int) -> None:
        """Starts the servers and joins them. Collective.

        Args:
            workers: The ranks that have gradients.
            servers: How many servers to start.
        """
        rank, size = workers.rank(), workers.size()
        self._leads = rank == 0
        self._workers = size
        agreed: list[Any] = [None, None]
        if self._leads:
            agreed = [secrets.token_hex(8), server_ranks(servers)]
        dist.broadcast_object_list(agreed, group=workers, group_src=0)
        prefix, ranks = agreed
        self._store = open_store(store_address(), prefix)
        global_ranks = [*dist.get_process_group_ranks(workers), *ranks]
        name, backend = group_name(ranks), dist.get_backend(workers)
        self._processes = [
            _start(
                prefix,
                size + server,
                size + servers,
                servers=servers,
                global_ranks=global_ranks,
                name=name,
                backend=backend,
            )
            for server in range(servers)
            if server % size == rank
        ]
        self._servers = servers
        self._lines = connect(self._store, rank, size, servers, JOIN_SECONDS)
        self._lines.watch(self._server_died)
        self.group = join_group(
            c10d.PrefixStore("group", self._store),
            rank,
            size + servers,
            global_ranks,
            name=name,
            backend=backend,
        )
        self._numbers = itertools.count()
        self._closed = False
        atexit.register(self.close)

    def announce(self, tag: int, dtype: torch.dtype, owners: Sequence[Ownership]) -> None:
        """Announces the next push of all workers to the servers.

        Args:
            tag: Tag of the exchange's messages.
            dtype: Type of the elements.
            owners: The keys with the ranks of their servers.
        """
        number = next(self._numbers)
        if not self._leads:
            return
        keys = [(owner.start, owner.stop, owner.rank) for owner in owners]
        self._tell(number, json.dumps([tag, str(dtype).removeprefix("torch."), keys]))
        if number >= _KEPT:
            self._store.delete_key(f"message/{number - _KEPT}")

    def close(self) -> None:
        """Ends the servers. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._lines.close()
        if self._leads:
            self._tell(next(self._numbers), END)
        wait_or_kill(self._processes)
        # A store that the first worker keeps must exist until all servers have ended.
        ended = f"ended/{self.group.rank()}"
        self._store.set(ended, "1")
        if self._leads:
            self._store.wait([f"ended/{rank}" for rank in range(self._workers)])

    def _server_died(self, server: int) -> None:
        if self._closed:
            return
        say_server_died(server, self._servers)
        # The training thread waits in a library, which may not notice, or say it at length.
        os._exit(1)

    def _tell(self, number: int, text: str) -> None:
        self._store.set(f"message/{number}", text)


def _start(
    prefix: str,
    rank: int,
    size: int,
    *,
    servers: int,
    global_ranks: Sequence[int],
    name: str,
    backend: str,
) -> subprocess.Popen[bytes]:
    options = {
        "store": store_address(),
        "prefix": prefix,
        "rank": rank,
        "size": size,
        "servers": servers,
        "global_ranks": list(global_ranks),
        "name": name,
        "backend": backend,
        "transport": asdict(transport) if (transport := registered(backend)) else {},
        "parent": os.getpid(),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ddltrace.experiments.collectives.server", json.dumps(options)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "RANK": str(global_ranks[rank])},
    )
