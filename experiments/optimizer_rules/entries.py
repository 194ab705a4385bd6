"""The optimizer axis of the catalogue: one entry for each optimizer rule."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.optimizer_rules.lamb import Lamb
from ddltrace.experiments.optimizer_rules.lars import Lars
from ddltrace.experiments.technique import Technique

TECHNIQUES: Final = (
    Technique(
        "optimizer",
        "lars",
        "SGD with layer-wise rates and warm-up, for large batches",
        "LARS, arXiv 1708.03888",
        Lars,
        needs=("a learning rate of its own: the trust coefficient multiplies it",),
    ),
    Technique(
        "optimizer",
        "lamb",
        "Adam with layer-wise rates and warm-up, for large batches",
        "LAMB, arXiv 1904.00962",
        Lamb,
    ),
)
