"""The order axis of the catalogue: one entry for each schedule."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.schedules.best_buckets import BestBuckets
from ddltrace.experiments.schedules.bytescheduler import ByteScheduler
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.fifo import Fifo
from ddltrace.experiments.schedules.fusion import Fusion
from ddltrace.experiments.schedules.mgwfbp import MgWfbp
from ddltrace.experiments.schedules.odsgd import OdSgd
from ddltrace.experiments.schedules.p3 import P3
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.schedules.tictac import TicTac
from ddltrace.experiments.schedules.wait_free import WaitFree
from ddltrace.experiments.technique import Technique

_LAYERS: Final = "an optimizer that updates each parameter by itself (not LBFGS)"

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
    Technique(
        "order",
        "mgwfbp",
        "merges gradients if waiting for the next costs less than the start of a message",
        "MG-WFBP, arXiv 1811.11141",
        MgWfbp,
        needs=("some 6 steps to measure when gradients are ready",),
    ),
    Technique(
        "order",
        "poseidon",
        "as wfbp; dense layers exchange the factors of their gradients where these are smaller",
        "Poseidon, ATC 2017",
        Poseidon,
        needs=("nn.Linear layers in float32 or float64 for the factors; else it is wfbp",),
    ),
    Technique(
        "order",
        "fusion",
        "once a cycle, all ready tensors in one message up to a threshold",
        "Horovod, arXiv 1802.05799",
        Fusion,
    ),
    Technique(
        "order",
        "p3",
        "slices by priority, one in flight; each layer's next forward waits for its own",
        "P3, MLSys 2019",
        P3,
        needs=(_LAYERS,),
    ),
    Technique(
        "order",
        "bytescheduler",
        "partitions by priority, with a limit on the bytes in flight",
        "ByteScheduler, SOSP 2019",
        ByteScheduler,
        needs=(_LAYERS,),
    ),
    Technique(
        "order",
        "tictac",
        "whole tensors in the order in which the next forward uses them",
        "TicTac, MLSys 2019",
        TicTac,
        needs=(_LAYERS,),
    ),
    Technique(
        "order",
        "odsgd",
        "updates one step late: a whole step of computation hides the exchange",
        "OD-SGD, arXiv 2005.06728",
        OdSgd,
        needs=("torch.optim.SGD, without a GradScaler",),
    ),
    Technique(
        "order",
        "best_buckets",
        "DDP's buckets of the size that is fastest for this job here, found by measurement",
        "requested by PyTorch's users: pytorch#118421, pytorch#39022",
        BestBuckets,
        needs=("some 40 steps to measure the candidates",),
    ),
)
