"""Presets: named compositions of techniques of published systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Preset:
    """A name for a composition.

    A system that is one technique needs no preset: the technique has its name.

    Attributes:
        name: Its name in a spec.
        expands_to: The spec that it is replaced by.
        source: The paper or system.
        summary: What it does, in one line.
    """

    name: str
    expands_to: str
    source: str
    summary: str


PRESETS: Final = (
    Preset(
        "sparseloco",
        "diloco:period=30,outer_lr=1,outer_momentum=0"
        "+topk:density=0.02,chunk=4096,bits=2+feedback:decay=0.95",
        "SparseLoCo, arXiv 2508.15706",
        "local AdamW steps, then 2 % of each chunk of the outer gradient in 2 bits, with feedback",
    ),
    Preset(
        "qwz",
        "fsdp:gather=int8",
        "ZeRO++, arXiv 2306.10209",
        "parameters gathered as 8-bit blocks",
    ),
    Preset(
        "qgz",
        "fsdp:reduce=int4",
        "ZeRO++, arXiv 2306.10209",
        "gradients sent once to the rank that keeps their part, as 4-bit blocks",
    ),
    Preset(
        "muloco",
        "diloco:period=30+muon",
        "MuLoCo, arXiv 2505.23725",
        "local Muon steps, then an outer Nesterov step on the averaged distance",
    ),
)
