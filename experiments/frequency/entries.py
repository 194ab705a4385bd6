"""The frequency axis of the catalogue: one entry for each frequency rule."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.local_sgd import LocalSgd
from ddltrace.experiments.frequency.post_local_sgd import PostLocalSgd
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo
from ddltrace.experiments.technique import Technique

_AXIS: Final = "frequency"

TECHNIQUES: Final = (
    Technique(
        _AXIS,
        "accumulate",
        "one exchange and one update for several backward passes: a large batch",
        "Large Batch Training, arXiv 1708.03888",
        Accumulate,
    ),
    Technique(
        _AXIS,
        "localsgd",
        "ranks train alone and average parameters; a codec encodes the differences",
        "Local SGD, arXiv 1805.09767",
        LocalSgd,
    ),
    Technique(
        _AXIS,
        "postlocalsgd",
        "synchronous at first, then local SGD",
        "Post-local SGD, arXiv 1808.07217",
        PostLocalSgd,
    ),
    Technique(
        _AXIS,
        "diloco",
        "ranks train alone; an outer Nesterov step on the averaged distance",
        "DiLoCo, arXiv 2311.08105; with topk+feedback SparseLoCo, arXiv 2508.15706",
        DiLoCo,
        needs=("memory for a copy of the parameters",),
    ),
    Technique(
        _AXIS,
        "streaming_diloco",
        "DiLoCo by fragments, each exchanged while training continues",
        "Streaming DiLoCo, arXiv 2501.18512",
        StreamingDiLoCo,
        needs=("memory for a copy of the parameters",),
    ),
    Technique(
        _AXIS,
        "demo",
        "exchanges the largest DCT coefficients of local momentum, updates by their sign",
        "DeMo, arXiv 2411.19870",
        Demo,
        needs=("a learning rate for updates of size 1", "no codec beside it"),
    ),
)
