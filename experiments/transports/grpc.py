"""gRPC: remote procedure calls over HTTP/2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "grpc",
    "gRPC's streams over HTTP/2",
    "gRPC, grpc.io; grpcio",
    needs=("pip install 'ddltrace[grpc]'",),
)
@dataclass(frozen=True)
class Grpc(Transport):
    """One client stream in each direction between two ranks; payloads are not serialized."""

    name: ClassVar[str] = "grpc"
    backend: ClassVar[str] = "grpc"
    extra: ClassVar[str | None] = "grpc"
