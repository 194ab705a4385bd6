"""What every workload gives to the worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Score:
    """How good a model is.

    Attributes:
        train_loss: Mean loss over all training examples.
        test_loss: Mean loss over the held-out examples.
        test_accuracy: Share of held-out examples whose class is found, 0 to 1.
    """

    train_loss: float
    test_loss: float
    test_accuracy: float


class Workload(Protocol):
    """A model, its data and its loss; the same on every rank that has the same seed."""

    model: nn.Module

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of the training data, epoch after epoch, without an end."""
        ...

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of one batch."""
        ...

    def score(self) -> Score:
        """Evaluates the model as it is now, without the other ranks."""
        ...
