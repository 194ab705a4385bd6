"""Registers the transports as backends of `torch.distributed`."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ddltrace.experiments.transports.protocols import protocol_of_job
from ddltrace.experiments.transports.transport import (
    Gloo,
    Grpc,
    Mpi,
    Nccl,
    Tcp,
    Transport,
    Ucx,
    ZeroMq,
)
from ddltrace.tracer.errors import MissingCapabilityError
from ddltrace.tracer.optional_packages import require_extra


def backend_of(transport: Transport) -> str:
    """Makes a transport usable as ``backend=`` of a new process group.

    Args:
        transport: The message library.

    Returns:
        The backend's name.

    Raises:
        MissingCapabilityError: It cannot be used here; the message says why.
    """
    check_available(transport)
    if isinstance(transport, Gloo | Nccl):
        return transport.backend
    _registered[transport.backend] = transport
    _register(transport.backend, transport.device)
    return transport.backend


def check_available(transport: Transport) -> None:
    """Checks that a transport can be used on this machine.

    Raises:
        MissingCapabilityError: It cannot; the message says why.
    """
    if isinstance(transport, Nccl) and not (dist.is_nccl_available() and _has_gpu()):
        raise MissingCapabilityError("the transport nccl needs a GPU for each rank")
    if isinstance(transport, Tcp):
        from ddltrace.experiments.transports.backends.tcp_backend import check_options

        check_options(transport)
    if transport.extra is not None:
        require_extra(transport.extra, f"the transport {transport.name}")


def registered(backend: str) -> Transport | None:
    """The transport, with its options, that `backend_of` registered last under a name."""
    return _registered.get(backend)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_registered: Final[dict[str, Transport]] = {}


@functools.cache
def _register(backend: str, device: str) -> None:
    def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        return _create(_registered[backend], store, rank, size, timeout)

    dist.Backend.register_backend(backend, create, devices=[device])


def _create(transport: Transport, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    group = _create_unpaced(transport, store, rank, size, timeout)
    protocol = protocol_of_job()
    if protocol is None:
        return group
    from ddltrace.experiments.transports.backends.paced_group import PacedGroup

    return PacedGroup(group, protocol, store, rank=rank, size=size, timeout=timeout)


def _create_unpaced(
    transport: Transport, store: Store, rank: int, size: int, timeout: timedelta
) -> Any:
    # Each library is loaded only where it is used.
    if isinstance(transport, ZeroMq):
        from ddltrace.experiments.transports.backends.zeromq_backend import ZeroMqGroup

        return ZeroMqGroup(store, rank, size, timeout)
    if isinstance(transport, Grpc):
        from ddltrace.experiments.transports.backends.grpc_backend import GrpcGroup

        return GrpcGroup(store, rank, size, timeout)
    if isinstance(transport, Tcp):
        from ddltrace.experiments.transports.backends.tcp_backend import TcpGroup

        return TcpGroup(transport, store, rank, size, timeout)
    assert isinstance(transport, Mpi | Ucx)
    from ddltrace.experiments.transports.backends.mpi_backend import MpiGroup

    return MpiGroup(transport, store, rank, size, timeout)
