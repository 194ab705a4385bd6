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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from ddltrace.experiments.architectures.parameter_server import SERVER_DIED
from ddltrace.experiments.architectures.transfers import Ownership
from ddltrace.experiments.collectives.lifelines import connect
from ddltrace.experiments.transports import NAMES as TRANSPORTS
from ddltrace.experiments.transports import by_name
from ddltrace.experiments.transports.backends.meeting import JOIN_SECONDS
from ddltrace.experiments.transports.backends.register import backend_of, registered
from ddltrace.tracer.errors import MissingCapabilityError

_FOREVER: Final = timedelta(days=365)


def store_address() -> dict[str, Any]:
    """Where the job's store is, for `open_store` in another process.

    Raises:
        MissingCapabilityError: Other processes cannot reach it.
    """
    store: Any = c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return {"host": store.host, "port": store.port}
    if isinstance(store, FileStore):
        file: Any = store
        return {"path": file.path}
    raise MissingCapabilityError(
        "servers of a parameter server need a job whose ranks meet at a TCPStore or a FileStore, "
        f"not at a {type(store).__name__}"
    )


def open_store(address: dict[str, Any], prefix: str) -> Store:
    """A client of its own of the job's store, whose requests may take as long as the job.

    Args:
        address: From `store_address`.
        prefix: Keeps the keys apart from all others.
    """
    store: Any
    if "path" in address:
        store = FileStore(address["path"])
    else:
        store = TCPStore(
            address["host"],
            address["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=_FOREVER,
        )
    return PrefixStore(prefix, store)


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
    global_ranks: Sequence[int],
    *,
    name: str,
    backend: str,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """The group of workers and servers, outside of the job's own groups.

    Args:
        store: The store through which workers and servers connect.
        rank: Rank of this process in the group.
        global_ranks: The ranks in the trace of workers and servers.
        name: Its name in the trace.
        backend: ``gloo``, or a transport that is a backend of its own.
        timeout: Longest time that a message may take.
    """
    size = len(global_ranks)
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


class Servers:
    """Servers in processes of their own, on the side of a worker.

    Attributes:
        group: Workers, then servers.
    """

    def __init__(
        self,
        workers: dist.ProcessGroup,
        servers: int,
        *,
        program: str,
        options: Mapping[str, Any],
        backend: str,
        timeout: timedelta,
        outlive_starter: bool,
    ) -> None:
        """Starts the servers and joins them. Collective.

        Args:
            workers: The ranks that have gradients.
            servers: How many servers to start. A job has several sets of them if it trains several
                models.
            program: Module that each server runs; it calls `collectives.server.join`.
            options: Further options of the program, as JSON values.
            backend: Backend that carries the messages.
            timeout: Longest time that a message may take.
            outlive_starter: Whether a server survives the death of the worker that has started it.
        """
        rank, size = workers.rank(), workers.size()
        self._rank, self._workers, self._servers = rank, size, servers
        agreed: list[Any] = [None, None]
        if rank == 0:
            # In the trace, servers come after all others of the job.
            sets = c10d._get_default_store().add("ddltrace/servers", servers)
            agreed = [secrets.token_hex(8), dist.get_world_size() + sets - servers]
        dist.broadcast_object_list(agreed, group=workers, group_src=0)
        prefix, first = agreed
        global_ranks = [*dist.get_process_group_ranks(workers), *range(first, first + servers)]
        name = "parameter server" + (f" from rank {first}" if first > dist.get_world_size() else "")
        transport = registered(backend)
        self._closed = False
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", program),
                    json.dumps(
                        {
                            "store": store_address(),
                            "prefix": prefix,
                            "rank": size + server,
                            "servers": servers,
                            "global_ranks": global_ranks,
                            "name": name,
                            "backend": backend,
                            "transport": asdict(transport) if transport else {},
                            "timeout_s": timeout.total_seconds(),
                            "parent": os.getpid(),
                            **options,
                        }
                    ),
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "RANK": str(global_ranks[size + server])},
                start_new_session=outlive_starter,
            )
            for server in range(servers)
            if server % size == rank
        ]
        self._store = open_store(store_address(), prefix)
        self._lines = connect(self._store, rank, size, servers, JOIN_SECONDS)
        self._lines.watch(self._line_ended)
        self.group = join_group(
            c10d.PrefixStore("group", self._store),
            rank,
            global_ranks,
            name=name,
            backend=backend,
            timeout=timeout,
        )

    def close(self) -> None:
        """Leaves the servers, which end when all workers have left. May be called again."""
        if not self._closed:
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        self._lines.close()
        self._wait_or_kill()

    def _wait_or_kill(self) -> None:
        for process in self._processes:
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _line_ended(self, server: int) -> None:
        if self._closed:
            return
        self._server_died(server)
        print(
            f"ddltrace: server {server} of {self._servers} {SERVER_DIED}; "
            "the training ends, because its parameters are lost",
            file=sys.stderr,
            flush=True,
        )
        self._end_process()

    def _server_died(self, server: int) -> None:
        """Called before the line that says so is printed."""

    def _end_process(self) -> None:
        # The training thread waits in a library, which may not notice, or say it at length.
        os._exit(1)


class SummingServers(Servers):
    """Servers that sum what all workers push."""

    def __init__(self, workers: dist.ProcessGroup, servers: int) -> None:
        """Starts the servers and joins them. Collective; arguments as of `Servers`."""
        super().__init__(
            workers,
            servers,
            program="ddltrace.experiments.collectives.server",
            options={},
            backend=dist.get_backend(workers),
            timeout=_PATIENCE,
            outlive_starter=False,
        )
        self._leads = self._rank == 0
        self._numbers = itertools.count()
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

    def _leave(self) -> None:
        atexit.unregister(self.close)
        self._lines.close()
        if self._leads:
            self._tell(next(self._numbers), END)
        self._wait_or_kill()
        # A store that the first worker keeps must exist until all servers have ended.
        self._store.set(f"ended/{self._rank}", "1")
        if self._leads:
            self._store.wait([f"ended/{rank}" for rank in range(self._workers)])

    def _tell(self, number: int, text: str) -> None:
        self._store.set(f"message/{number}", text)
