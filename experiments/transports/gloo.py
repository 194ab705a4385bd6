"""Gloo: the TCP library that PyTorch brings for tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "gloo",
    "TCP sockets between processes on the CPU; the default there",
    "Gloo, github.com/pytorch/gloo",
)
@dataclass(frozen=True)
class Gloo(Transport):
    """Sends and collectives of Gloo over TCP sockets."""

    name: ClassVar[str] = "gloo"
    backend: ClassVar[str] = "gloo"
