"""The rules of synchronization: the synchronization axis of the catalogue."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.synchronization.adaptive_ssp import AdaptiveSsp
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.asp import Asp
from ddltrace.experiments.synchronization.backup import Backup
from ddltrace.experiments.synchronization.bsp import Bsp
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.ssp import Ssp
from ddltrace.experiments.technique import Technique

_AXIS: Final = "synchronization"
_SERVERS: Final = ("servers in processes of their own: one, or as ps:servers=N says",)

TECHNIQUES: Final = (
    Technique(
        _AXIS,
        "bsp",
        "every rank waits for every gradient of the step; the default",
        "Valiant, CACM 1990",
        Bsp,
    ),
    Technique(
        _AXIS,
        "ssp",
        "a worker may be at most bound steps ahead of the slowest one",
        "Ho et al., NeurIPS 2013",
        Ssp,
        needs=_SERVERS,
    ),
    Technique(
        _AXIS,
        "asp",
        "no worker waits for another",
        "Dean et al., NeurIPS 2012",
        Asp,
        needs=_SERVERS,
    ),
    Technique(
        _AXIS,
        "adaptive_ssp",
        "ssp whose bound follows the measured lateness of the slowest worker",
        "Zhao et al., ICDCS 2019",
        AdaptiveSsp,
        needs=_SERVERS,
    ),
    Technique(
        _AXIS,
        "backup",
        "each update takes the first gradients of its round; those of the last workers are dropped",
        "Chen et al., arXiv 1604.00981",
        Backup,
        needs=_SERVERS,
    ),
    Technique(
        _AXIS,
        "grouped",
        "groups average gradients in each step, all ranks parameters every few steps",
        "Lin et al., ICLR 2020",
        Grouped,
    ),
    Technique(
        _AXIS,
        "gossip",
        "D-PSGD: ranks average parameters with their neighbours on a ring in each step",
        "Lian et al., NeurIPS 2017",
        Gossip,
    ),
    Technique(
        _AXIS,
        "adpsgd",
        "AD-PSGD: ranks average parameters in pairs at any time, without waiting for each other",
        "Lian et al., ICML 2018",
        AdPsgd,
    ),
)
