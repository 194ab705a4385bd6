"""The transport axis: the message library that carries a strategy's messages.

A module here describes one library and knows nothing of PyTorch; `backends` makes a backend of
`torch.distributed` of each.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.grammar import Grammar
from ddltrace.experiments.technique import on_axis
from ddltrace.experiments.transports.gloo import Gloo
from ddltrace.experiments.transports.grpc import Grpc
from ddltrace.experiments.transports.mpi import Mpi
from ddltrace.experiments.transports.nccl import Nccl
from ddltrace.experiments.transports.tcp import Tcp
from ddltrace.experiments.transports.transport import Transport
from ddltrace.experiments.transports.ucx import Ucx
from ddltrace.experiments.transports.zeromq import ZeroMq

TRANSPORTS: Final[tuple[type[Transport], ...]] = (Gloo, Mpi, ZeroMq, Grpc, Ucx, Nccl, Tcp)

NAMES: Final = tuple(transport.name for transport in TRANSPORTS)


def by_name(name: str) -> Transport:
    """The transport of a name in `NAMES`."""
    (found,) = (transport for transport in TRANSPORTS if transport.name == name)
    return found()


_GRAMMAR: Final = Grammar("transport", lambda: on_axis("transport", TRANSPORTS))


def read(spec: str) -> tuple[str, Transport]:
    """Reads a transport with its options, such as ``tcp:connections=4``.

    Args:
        spec: Its name, and options where it has some.

    Returns:
        The spec in canonical form, and the transport.

    Raises:
        UsageError: There is no such transport or option.
    """
    named = _GRAMMAR.read(spec)["transport"]
    transport = named.value
    assert isinstance(transport, Transport)
    return named.text, transport
