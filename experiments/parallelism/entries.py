"""The parallelism axis of the catalogue."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.parallelism.descriptions import (
    ExpertParallel,
    Fsdp,
    GPipe,
    OneForwardOneBackward,
    TensorParallel,
    Zero,
)
from ddltrace.experiments.technique import Technique

_AXIS: Final = "parallelism"
_GPT: Final = ("--workload gpt",)

TECHNIQUES: Final = (
    Technique(_AXIS, "data", "each rank has the whole model and its own examples"),
    Technique(
        _AXIS,
        "tensor",
        "each rank has a part of each layer",
        "Megatron-LM, arXiv 1909.08053",
        TensorParallel,
        needs=_GPT,
    ),
    Technique(
        _AXIS,
        "gpipe",
        "each rank has consecutive layers; all forward, then all backward passes",
        "GPipe, NeurIPS 2019",
        GPipe,
        needs=_GPT,
    ),
    Technique(
        _AXIS,
        "1f1b",
        "each rank has consecutive layers; backward passes begin as soon as they can",
        "PipeDream-Flush, ICML 2021",
        OneForwardOneBackward,
        needs=_GPT,
    ),
    Technique(
        _AXIS,
        "expert",
        "each rank has some experts; tokens travel by all-to-all",
        "GShard, ICLR 2021",
        ExpertParallel,
        needs=("--workload moe",),
    ),
    Technique(
        _AXIS,
        "zero",
        "each rank has a part of the optimizer's state",
        "ZeRO stage 1, SC 2020",
        Zero,
        needs=("a built-in workload",),
    ),
    Technique(
        _AXIS,
        "fsdp",
        "each rank has a part of every parameter, gathered layer by layer",
        "ZeRO stage 3, SC 2020; PyTorch FSDP, VLDB 2023",
        Fsdp,
        needs=("a built-in workload",),
    ),
)
