"""The transport axis: the message library that carries a strategy's messages.

`transport` describes the libraries without PyTorch; `backends` makes a backend of
`torch.distributed` of each.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.grammar import Grammar
from ddltrace.experiments.technique import on_axis
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
