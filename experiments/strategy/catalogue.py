"""The catalogue of all techniques, along the axes on which they combine.

Each technique registers itself in its file; this module lists the built-in ones in the order in
which they are shown. Those of plug-ins follow them on their axis.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments import codecs, transports
from ddltrace.experiments.architectures.auto import Auto
from ddltrace.experiments.architectures.double_tree import DoubleTree
from ddltrace.experiments.architectures.halving_doubling import HalvingDoubling
from ddltrace.experiments.architectures.hierarchical import Hierarchical
from ddltrace.experiments.architectures.mesh import Mesh
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.architectures.tree import Tree
from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo, StreamingDiLoCo
from ddltrace.experiments.frequency.dion import Dion
from ddltrace.experiments.frequency.local_sgd import LocalSgd, PostLocalSgd
from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.optimizer_rules.lamb import Lamb
from ddltrace.experiments.optimizer_rules.lars import Lars
from ddltrace.experiments.optimizer_rules.muon import Muon
from ddltrace.experiments.parallelism.descriptions import (
    ExpertParallel,
    Fsdp,
    GPipe,
    OneForwardOneBackward,
    TensorParallel,
    Zero,
)
from ddltrace.experiments.schedules.bytescheduler import ByteScheduler
from ddltrace.experiments.schedules.ddp_buckets import BestBuckets, DdpBuckets
from ddltrace.experiments.schedules.fusion import Fusion
from ddltrace.experiments.schedules.mgwfbp import MgWfbp
from ddltrace.experiments.schedules.odsgd import OdSgd
from ddltrace.experiments.schedules.p3 import P3, TicTac
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.schedules.wait_free import Fifo, WaitFree
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.bsp import Backup, Bsp
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.ssp import AdaptiveSsp, Asp, Ssp
from ddltrace.experiments.technique import Technique, on_axis

_DEFAULTS: Final = (
    Technique("frequency", "every-step", "exchange after every backward pass"),
    Technique("volume", "none", "gradients are sent unchanged"),
    Technique("optimizer", "as-is", "the job's own optimizer"),
    Technique("parallelism", "data", "each rank has the whole model and its own examples"),
    Technique("architecture", "library", "the transport's own all_reduce"),
    Technique("network", "as-is", "the network of this machine"),
    Technique(
        "network",
        "emulated",
        "a namespace per rank behind a shaped link: --hosts N --bandwidth RATE",
    ),
)

_BUILT_IN: Final[dict[str, tuple[type[object], ...]]] = {
    "frequency": (
        Accumulate,
        LocalSgd,
        PostLocalSgd,
        DiLoCo,
        StreamingDiLoCo,
        NoLoCo,
        Demo,
        Dion,
    ),
    "volume": codecs.CODECS,
    "order": (
        Fifo,
        WaitFree,
        DdpBuckets,
        MgWfbp,
        Poseidon,
        Fusion,
        P3,
        ByteScheduler,
        TicTac,
        OdSgd,
        BestBuckets,
    ),
    "optimizer": (Lars, Lamb, Muon),
    "parallelism": (TensorParallel, GPipe, OneForwardOneBackward, ExpertParallel, Zero, Fsdp),
    "architecture": (
        Ring,
        HalvingDoubling,
        Tree,
        DoubleTree,
        Mesh,
        Hierarchical,
        ParameterServer,
        Auto,
    ),
    "synchronization": (Bsp, Ssp, Asp, AdaptiveSsp, Backup, Grouped, Gossip, AdPsgd),
    "transport": transports.TRANSPORTS,
    "network": (),
}


def techniques() -> tuple[Technique, ...]:
    """All techniques, axis by axis: the default of each axis, the others, those of plug-ins."""
    return tuple(
        entry
        for axis, built_in in _BUILT_IN.items()
        for entry in (
            *(default for default in _DEFAULTS if default.axis == axis),
            *on_axis(axis, built_in),
        )
    )
