"""NCCL: NVIDIA's library for tensors on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "nccl",
    "NVIDIA's library between GPUs; the default there",
    "NCCL, developer.nvidia.com/nccl",
    needs=("a GPU for each rank",),
)
@dataclass(frozen=True)
class Nccl(Transport):
    """Sends and collectives of NCCL; needs a GPU for each rank."""

    name: ClassVar[str] = "nccl"
    backend: ClassVar[str] = "nccl"
    device: ClassVar[str] = "cuda"
