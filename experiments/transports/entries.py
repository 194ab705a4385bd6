"""The transport axis of the catalogue: one entry for each message library."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.grammar import Grammar
from ddltrace.experiments.technique import Technique
from ddltrace.experiments.transports.gloo import Gloo
from ddltrace.experiments.transports.grpc import Grpc
from ddltrace.experiments.transports.mpi import Mpi
from ddltrace.experiments.transports.nccl import Nccl
from ddltrace.experiments.transports.tcp import Tcp
from ddltrace.experiments.transports.transport import Transport
from ddltrace.experiments.transports.ucx import Ucx
from ddltrace.experiments.transports.zeromq import ZeroMq

_AXIS: Final = "transport"

TECHNIQUES: Final = (
    Technique(
        _AXIS,
        "gloo",
        "TCP sockets between processes on the CPU; the default there",
        "Gloo, github.com/pytorch/gloo",
        Gloo,
    ),
    Technique(
        _AXIS,
        "mpi",
        "MPICH over libfabric",
        "MPICH, mpich.org; mpi4py",
        Mpi,
        needs=("pip install 'ddltrace[mpi]'",),
    ),
    Technique(
        _AXIS,
        "zmq",
        "ZeroMQ's queues over TCP",
        "ZeroMQ, zeromq.org; pyzmq",
        ZeroMq,
        needs=("pip install 'ddltrace[zmq]'",),
    ),
    Technique(
        _AXIS,
        "grpc",
        "gRPC's streams over HTTP/2",
        "gRPC, grpc.io; grpcio",
        Grpc,
        needs=("pip install 'ddltrace[grpc]'",),
    ),
    Technique(
        _AXIS,
        "ucx",
        "MPICH over UCX",
        "UCX, openucx.org; mpi4py",
        Ucx,
        needs=("pip install 'ddltrace[mpi]'",),
    ),
    Technique(
        _AXIS,
        "nccl",
        "NVIDIA's library between GPUs; the default there",
        "NCCL, developer.nvidia.com/nccl",
        Nccl,
        needs=("a GPU for each rank",),
    ),
    Technique(
        _AXIS,
        "tcp",
        "TCP sockets without a library, with the protocol's options",
        "RFC 9293; Nagle: RFC 896",
        Tcp,
    ),
)


NAMES: Final = tuple(entry.name for entry in TECHNIQUES)


def by_name(name: str) -> Transport:
    """The transport of a name in `NAMES`."""
    (entry,) = (entry for entry in TECHNIQUES if entry.name == name)
    assert entry.build is not None
    transport = entry.build()
    assert isinstance(transport, Transport)
    return transport


_GRAMMAR: Final = Grammar("transport", TECHNIQUES, {})


def read(spec: str) -> tuple[str, Transport]:
    """Reads a transport with its options, such as ``tcp:connections=4``.

    Args:
        spec: Its name, and options where it has some.

    Returns:
        The spec in canonical form, and the transport.

    Raises:
        UsageError: There is no such transport or option.
    """
    named = _GRAMMAR.read(spec)[_AXIS]
    transport = named.value
    assert isinstance(transport, Transport)
    return named.text, transport
