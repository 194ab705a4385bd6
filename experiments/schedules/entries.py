"""The order axis of the catalogue: one entry for each schedule."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.fifo import Fifo
from ddltrace.experiments.schedules.wait_free import WaitFree
from ddltrace.experiments.strategy.technique import Technique

TECHNIQUES: Final = (
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
)
