"""Every technique that exists here, along the axes on which they combine.

The axes are those of Dong & Ouyang, "Optimization Techniques of Network Communication in
Distributed Deep Learning Systems", ZTE Technology Journal, 2020. A new technique is a new file
and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.fifo import Fifo
from ddltrace.experiments.schedules.wait_free import WaitFree

AXES: Final = (
    "frequency",
    "volume",
    "order",
    "architecture",
    "synchronization",
    "transport",
    "network",
)
"""How often, how much, in which order, between whom, how strictly, over what, across what."""


@dataclass(frozen=True)
class Technique:
    """One value on one axis.

    Attributes:
        axis: One of `AXES`.
        name: Its name in a strategy's spec.
        summary: What it does, in one line.
        source: Where it comes from.
        build: The class of its pure object, whose fields are its parameters; None for what
            happens anyway when nothing is chosen on the axis, and for the network, which is
            chosen by options of the command.
    """

    axis: str
    name: str
    summary: str
    source: str = ""
    build: type[Any] | None = None


TECHNIQUES: Final = (
    Technique("frequency", "every-step", "exchange after every backward pass"),
    Technique("volume", "none", "gradients travel as they were computed"),
    Technique(
        "order",
        "fifo",
        "one message a tensor, all after backward",
        "the unoptimized reference",
        Fifo,
    ),
    Technique(
        "order",
        "wfbp",
        "one message a tensor, as soon as its gradient is ready",
        "Poseidon, ATC 2017",
        WaitFree,
    ),
    Technique(
        "order",
        "ddp",
        "PyTorch's DistributedDataParallel with its buckets",
        "PyTorch Distributed, VLDB 2020",
        DdpBuckets,
    ),
    Technique("architecture", "library", "the transport's own all_reduce"),
    Technique("synchronization", "bsp", "every rank waits for every gradient of the step"),
    Technique("transport", "gloo", "TCP sockets between processes on the CPU"),
    Technique("network", "as-is", "the network of this machine"),
    Technique(
        "network",
        "emulated",
        "a namespace per rank behind a shaped link: --hosts N --bandwidth RATE",
    ),
)


def technique(name: str) -> Technique | None:
    """The technique that can be named in a strategy's spec, or None."""
    for entry in TECHNIQUES:
        if entry.build is not None and entry.name == name:
            return entry
    return None


def choosable() -> list[str]:
    """Names that a strategy's spec may use."""
    return [entry.name for entry in TECHNIQUES if entry.build is not None]
