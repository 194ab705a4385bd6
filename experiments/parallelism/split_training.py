"""The interface of a training that is split over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.workloads.base import Workload


class SplitTraining(ABC):
    """Trains a workload's model, split over all ranks.

    Attributes:
        workload: The workload; `join` gathers its whole model.
        needs_all_examples: Whether each rank needs the examples of all ranks, in rank order.
        findings: After `join`: what the results tell of this split, as JSON values by name.
    """

    needs_all_examples = False

    def __init__(self, workload: Workload) -> None:
        """Takes the workload; a subclass splits its model. Collective.

        Args:
            workload: The same on all ranks.
        """
        self.workload = workload
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.findings: dict[str, Any] = {}

    @abstractmethod
    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """One training step.

        Args:
            inputs: The batch of this rank or of all ranks.
            targets: The targets of the batch.

        Returns:
            The mean loss of the batch; None on a rank that does not know it.
        """

    @abstractmethod
    def join(self) -> None:
        """Makes the workload's model whole on rank 0. Collective."""


def train_step(
    workload: Workload,
    model: nn.Module,
    optimizer: Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    before_update: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Forward, backward and update, once.

    Args:
        workload: The workload, which gives the loss.
        model: Its model, or a wrapper around it.
        optimizer: The optimizer of the model's parameters.
        inputs: The batch.
        targets: The targets of the batch.
        before_update: Called after the backward pass.

    Returns:
        The mean loss of the batch.
    """
    optimizer.zero_grad()
    loss = workload.loss(model(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    before_update()
    optimizer.step()
    return loss.detach()


def gather_states(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The state that each rank has, in the order of ranks. Collective."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, {key: value.detach().cpu() for key, value in state.items()})
    return states
