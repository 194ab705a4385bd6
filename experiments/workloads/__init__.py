"""What the experiments train: real models on real data that need no download."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddltrace.experiments.workloads.base import Workload


@dataclass(frozen=True)
class WorkloadInfo:
    """A workload before its module, and torch with it, is loaded.

    Attributes:
        module: Where its class is.
        kind: Name of the class.
        summary: What it trains, for the help text.
        width: Default size of its model.
        batch_size: Default number of examples per rank and step.
        learning_rate: Default rate of its optimizer.
        optimizer: Name of its optimizer's class.
        needs_sklearn: Whether its data come with scikit-learn.
    """

    module: str
    kind: str
    summary: str
    width: int
    batch_size: int
    learning_rate: float
    optimizer: str = "SGD"
    needs_sklearn: bool = False


WORKLOADS: Final = {
    "digits": WorkloadInfo(
        "ddltrace.experiments.workloads.images",
        "Digits",
        "a CNN on scikit-learn's 8 x 8 images of digits",
        width=32,
        batch_size=16,
        learning_rate=0.02,
        needs_sklearn=True,
    ),
    "vgg": WorkloadInfo(
        "ddltrace.experiments.workloads.images",
        "Vgg",
        "a VGG-like net on the same images, whose last layers hold 86 % of the bytes",
        width=32,
        batch_size=16,
        learning_rate=0.02,
        needs_sklearn=True,
    ),
    "resnet": WorkloadInfo(
        "ddltrace.experiments.workloads.images",
        "ResNet",
        "a ResNet-like net on the same images",
        width=16,
        batch_size=16,
        learning_rate=0.02,
        needs_sklearn=True,
    ),
    "gpt": WorkloadInfo(
        "ddltrace.experiments.workloads.gpt",
        "Gpt",
        "a small GPT on the help texts that come with Python",
        width=128,
        batch_size=8,
        learning_rate=0.002,
        optimizer="AdamW",
    ),
    "moe": WorkloadInfo(
        "ddltrace.experiments.workloads.moe",
        "Moe",
        "the same GPT with four experts in each block",
        width=64,
        batch_size=8,
        learning_rate=0.002,
        optimizer="AdamW",
    ),
    "recommender": WorkloadInfo(
        "ddltrace.experiments.workloads.recommender",
        "Recommender",
        "sparse embeddings of the modules and names of Python's library",
        width=32,
        batch_size=128,
        learning_rate=0.1,
        optimizer="Adagrad",
    ),
}
"""The workloads by name."""


def create(name: str, *, width: int, batch_size: int, seed: int) -> Workload:
    """Makes a workload by its name in `WORKLOADS`.

    Args:
        name: Which one.
        width: Size of its model.
        batch_size: Examples per rank and step.
        seed: Seed of its weights, its data's split and order.

    Raises:
        MissingCapabilityError: A package that it needs is not installed.
    """
    info = WORKLOADS[name]
    made: Workload = getattr(importlib.import_module(info.module), info.kind)(
        width=width, batch_size=batch_size, seed=seed
    )
    return made
