"""The interface of a training that is split over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    _trained: nn.Module
    """The model, or what wraps it: gives the outputs of a step."""
    _optimizer: Optimizer

    def __init__(self, workload: Workload) -> None:
        """Takes the workload; a subclass splits its model. Collective.

        Args:
            workload: The same on all ranks.
        """
        self.workload = workload
        self._trained = workload.model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.findings: dict[str, Any] = {}

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """One training step: forward, backward and update.

        Args:
            inputs: The batch of this rank or of all ranks.
            targets: The targets of the batch.

        Returns:
            The mean loss of the batch; None on a rank that does not know it.
        """
        self._optimizer.zero_grad()
        loss = self.workload.loss(self._trained(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._before_update()
        self._optimizer.step()
        return loss.detach()

    def _before_update(self) -> None:  # noqa: B027 - most have nothing to do there
        """Called after the backward pass of a step."""

    @abstractmethod
    def join(self) -> None:
        """Makes the workload's model whole on rank 0. Collective."""


def gather_states(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The state that each rank has, in the order of ranks. Collective."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, {key: value.detach().cpu() for key, value in state.items()})
    return states
