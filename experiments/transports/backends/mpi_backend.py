"""The backends ``mpi`` and ``ucx``: mpi4py over MPICH, in a job that MPI did not start.

MPICH's own connections prove nothing. So each two ranks send each other a message as soon as MPI is
initialized, which connects them, and then nobody else is admitted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.backends import pmi_server
from ddltrace.experiments.transports.backends.listening import admit_nobody, listening_ports
from ddltrace.experiments.transports.backends.mailbox import Future, as_bytes, fail
from ddltrace.experiments.transports.backends.meeting import (
    JOIN_SECONDS,
    Meeting,
    exchange,
    meet,
)
from ddltrace.experiments.transports.backends.messaging import COLLECTIVE, MessagingGroup
from ddltrace.experiments.transports.transport import Transport
from ddltrace.tracer.connections.addresses import interface_of
from ddltrace.tracer.connections.proof import connect_proven
from ddltrace.tracer.errors import MissingCapabilityError

_CHANNEL_BIT: Final = 1 << 20
_TAGS: Final = _CHANNEL_BIT - 1
_SPIN_S: Final = 0.0005
"""How long the progress thread asks MPI without a pause, before it begins to sleep."""
_PAUSE_S: Final = 0.0001


class _World(NamedTuple):
    """MPI in this process: initialized once, for one network module.

    Attributes:
        transport: The transport that initialized it.
        size: Ranks of the job.
        mpi: The module of mpi4py.
        server: The process manager, on rank 0.
        lost: Ranks that are gone.
        watch: The connection that reports ended ranks.
    """

    transport: str
    size: int
    mpi: Any
    server: subprocess.Popen[str] | None
    lost: set[int]
    watch: socket.socket


_worlds: Final[list[_World]] = []
"""The only MPI of this process, once it is initialized."""


class _Posted(NamedTuple):
    call: str
    tensor: torch.Tensor
    peer: int
    tag: int
    done: Future


_NOTHING: Final = _Posted("", torch.empty(0), 0, 0, torch.futures.Future())


class MpiGroup(MessagingGroup):
    """A process group over MPI.

    All calls of MPI come from one progress thread: MPI progresses only inside its calls. The
    thread asks without a pause while messages complete, and sleeps briefly between questions
    after that.
    """

    def __init__(
        self, transport: Transport, store: Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        """Initializes MPI if this is the first group, and makes a communicator. Collective.

        Args:
            store: Store of the group.
            rank: This rank.
            size: Number of ranks, which is that of the whole job.
            timeout: Longest time to wait for one operation.

        Raises:
            MissingCapabilityError: The group is only a part of the job's ranks, or MPI has been
                initialized for another transport.
        """
        super().__init__(transport.name, rank, size, timeout)
        world = _initialize(transport, store, rank, size, timeout)
        self._mpi = world.mpi
        self._lost = world.lost
        # Groups are made in the same order on all ranks, so a copy of the whole is collective.
        self._communicator = world.mpi.COMM_WORLD.Dup()
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._progress_thread = threading.Thread(
            target=self._progress, name=f"ddltrace-{transport.name}-progress", daemon=True
        )
        self._progress_thread.start()

    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Posts an Isend."""
        return self._post("Isend", tensor, peer, channel, tag)

    def receive_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Posts an Irecv."""
        return self._post("Irecv", tensor, peer, channel, tag)

    def close(self) -> None:
        """Ends the progress thread; MPI itself stays initialized for later groups."""
        self._posted.put(None)
        self._progress_thread.join()

    def _post(self, call: str, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        done: Future = torch.futures.Future()
        number = (tag & _TAGS) | (_CHANNEL_BIT if channel == COLLECTIVE else 0)
        self._posted.put(_Posted(call, tensor, peer, number, done))
        return done

    def _progress(self) -> None:
        pending: list[_Posted] = []
        requests: list[Any] = []
        busy_until = 0.0
        while True:
            try:
                # No operation is in progress: sleep until there is one.
                posted = self._posted.get(block=not pending)
            except queue.Empty:
                posted = _NOTHING
            if posted is None:
                return
            if posted is not _NOTHING:
                self._begin(posted, pending, requests)
                busy_until = time.monotonic() + _SPIN_S
                continue
            finished = self._test(pending, requests) or self._drop_lost(pending, requests)
            if finished:
                busy_until = time.monotonic() + _SPIN_S
            elif time.monotonic() > busy_until:
                time.sleep(_PAUSE_S)

    def _begin(self, posted: _Posted, pending: list[_Posted], requests: list[Any]) -> None:
        call = getattr(self._communicator, posted.call)
        try:
            buffer = [as_bytes(posted.tensor), self._mpi.BYTE]
            requests.append(call(buffer, posted.peer, posted.tag))
            pending.append(posted)
        except Exception as error:  # noqa: BLE001 - raised where the job waits
            fail(posted.done, RuntimeError(str(error)))

    def _drop_lost(self, pending: list[_Posted], requests: list[Any]) -> bool:
        """Fails operations with ranks that have ended, for which MPI itself would wait forever."""
        found = [index for index, posted in enumerate(pending) if posted.peer in self._lost]
        for index in reversed(found):
            del requests[index]
            posted = pending.pop(index)
            fail(posted.done, RuntimeError(f"rank {posted.peer} is gone"))
        return bool(found)

    def _test(self, pending: list[_Posted], requests: list[Any]) -> bool:
        try:
            indices = self._mpi.Request.Testsome(requests) or []
        except Exception as error:  # noqa: BLE001 - raised where the job waits
            for posted in pending:
                fail(posted.done, RuntimeError(str(error)))
            pending.clear()
            requests.clear()
            return True
        for index in sorted(indices, reverse=True):
            del requests[index]
            posted = pending.pop(index)
            posted.done.set_result([posted.tensor])
        return bool(indices)


def _initialize(
    transport: Transport, store: Store, rank: int, size: int, timeout: timedelta
) -> _World:
    name = transport.name
    if size != dist.get_world_size() and dist.is_initialized():
        raise MissingCapabilityError(
            f"the transport {name} needs all ranks of the job in each group, not {size} of them"
        )
    if not _worlds:
        _worlds.append(_start(transport, store, rank, size, timeout))
    (world,) = _worlds
    if world.transport != name:
        raise MissingCapabilityError(
            f"this process uses MPI for the transport {world.transport} already; a process has "
            f"one MPI, so {name} needs a job of its own"
        )
    return world


def _start(transport: Transport, store: Store, rank: int, size: int, timeout: timedelta) -> _World:
    name = transport.name
    meeting = meet(store, name, rank, size, timeout)
    server, own = _start_server(name, meeting, size) if rank == 0 else (None, "")
    address, _, port = exchange(store, name, rank, size, own)[0].rpartition(":")

    def connect(number: int) -> socket.socket:
        return connect_proven(
            (address, int(port)),
            meeting.secret,
            pmi_server.PURPOSE,
            number=number,
            timeout_s=JOIN_SECONDS,
        )

    pmi = {"PMI_FD": str(connect(rank).detach()), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    os.environ.update({**transport.environment(interface_of(meeting.address)), **pmi})
    import mpi4py

    # Finalizing waits for all ranks: after an error that would hang.
    mpi4py.rc.finalize = False
    before = listening_ports()
    try:
        # No other thread opens a socket: this one has the interpreter's lock meanwhile.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingCapabilityError(
            f"the transport {name} cannot load MPI: {error} (pip install 'ddltrace[mpi]')"
        ) from error
    finally:
        for variable in pmi:  # children of the job are not ranks of this MPI
            del os.environ[variable]
    of_mpi = listening_ports() - before
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    world.Alltoall(bytes(size), bytearray(size))
    world.Barrier()
    admit_nobody(of_mpi)
    lost: set[int] = set()
    watch = connect(size + rank)
    _watch(watch, lost)
    return _World(name, size, MPI, server, lost, watch)


def _start_server(name: str, meeting: Meeting, size: int) -> tuple[subprocess.Popen[str], str]:
    """Starts the process manager; returns it with its address and port."""
    server = subprocess.Popen(
        # Isolated, so that a tracer on the job's path stays out of it.
        [sys.executable, "-I", "-m", pmi_server.__name__, meeting.address, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{meeting.secret.hex()}\n")
    server.stdin.close()
    port = server.stdout.readline().strip()
    if not port:
        raise MissingCapabilityError(
            f"the process manager of the transport {name} did not start: status {server.wait()}"
        )
    return server, f"{meeting.address}:{port}"


def _watch(connection: socket.socket, lost: set[int]) -> None:
    """Records ended ranks, as reported by the process manager."""

    def listen() -> None:
        with connection.makefile("r", encoding="utf-8") as lines, contextlib.suppress(OSError):
            for line in lines:
                lost.add(int(line))
        lost.add(0)  # the process manager ends with rank 0

    threading.Thread(target=listen, name="ddltrace-mpi-watch", daemon=True).start()
