"""What computes an update in place of the job's optimizer: the seam of the optimizer axis."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.strategy.spec import Strategy


class OptimizerRule(ABC):
    """Updates parameters from their averaged gradients."""

    @abstractmethod
    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates some parameters of one group in place.

        Args:
            optimizer: The job's optimizer. State of a parameter belongs into
                ``optimizer.state[parameter]``, so that the job's checkpoints hold it.
            group: Its settings: learning rate, weight decay and the like.
            parameters: Those to update; ``grad`` of each is the average over the ranks.
        """


def create_optimizer_rule(strategy: Strategy) -> OptimizerRule | None:
    """The rule of a strategy's optimizer axis, or None for the job's own optimizer."""
    if strategy.optimizer_rule is None:
        return None
    updates = importlib.import_module("ddltrace.experiments.optimizer_rules.updates")
    rule: OptimizerRule = updates.create(strategy.optimizer_rule)
    return rule
