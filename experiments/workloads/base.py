"""The common part of all workloads: a model, its data, its loss and its score."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

_MOMENTUM: Final = 0.9
_SCORED_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Score:
    """How good a model is.

    Attributes:
        train_loss: Mean loss over the training examples; over `Workload.most_scored` of them,
            evenly spaced, if there are more.
        test_loss: Mean loss over the held-out examples, chosen likewise.
        test_accuracy: Share of held-out predictions that are right, 0 to 1.
    """

    train_loss: float
    test_loss: float
    test_accuracy: float


class Workload(ABC):
    """A model, its data and its loss; the same on every rank that has the same seed.

    Attributes:
        model: What is trained.
    """

    most_scored: ClassVar[int] = 1500
    """Examples of each kind over which `score` evaluates the model at most."""

    def __init__(
        self,
        model: nn.Module,
        train: TensorDataset,
        test: TensorDataset,
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        """Takes the parts that a subclass has made.

        Args:
            model: What is trained.
            train: Training examples: inputs and targets.
            test: Held-out examples.
            batch_size: Examples per rank and step.
            seed: Seed of the order of the training examples.
        """
        self.model = model
        self._train = train
        self._test = test
        self._batch_size = batch_size
        self._seed = seed

    @abstractmethod
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def correct(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Which predictions are right: booleans, one for each target."""

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer with which this model is usually trained: here SGD with momentum 0.9."""
        return torch.optim.SGD(self.model.parameters(), lr=learning_rate, momentum=_MOMENTUM)

    def batches(self, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's share of the training data, epoch after epoch, without an end.

        Raises:
            ValueError: The share is smaller than one batch.
        """
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            self._train, num_replicas=world_size, rank=rank, seed=self._seed
        )
        loader = DataLoader(
            self._train, batch_size=self._batch_size, sampler=sampler, drop_last=True
        )
        if len(loader) == 0:
            raise ValueError(
                f"a batch of {self._batch_size} is more than one rank's share of the data "
                f"({len(sampler)} examples)"
            )
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    @torch.no_grad()
    def score(self) -> Score:
        """Evaluates the model as it is now, without the other ranks."""
        train_loss, _ = self._evaluate(self._train)
        test_loss, test_accuracy = self._evaluate(self._test)
        return Score(train_loss, test_loss, test_accuracy)

    def _evaluate(self, data: TensorDataset) -> tuple[float, float]:
        """Mean loss and share of right predictions."""
        spacing = -(-len(data) // self.most_scored)
        inputs, targets = (tensor[::spacing] for tensor in data.tensors)
        total, right, predictions = 0.0, 0, 0
        for first in range(0, len(inputs), _SCORED_AT_ONCE):
            chosen = slice(first, first + _SCORED_AT_ONCE)
            target = targets[chosen]
            output = self.model(inputs[chosen])
            total += float(self.loss(output, target)) * len(target)
            hits = self.correct(output, target)
            right += int(hits.sum())
            predictions += hits.numel()
        return total / len(inputs), right / predictions
