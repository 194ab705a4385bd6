"""The interface of rules that compute an update in place of the job's optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class OptimizerRule(ABC):
    """Updates parameters from their averaged gradients."""

    @abstractmethod
    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates some parameters of one group in place.

        Args:
            optimizer: The job's optimizer. State of a parameter belongs into
                ``optimizer.state[parameter]``, under keys that begin with `STATE_PREFIX`, so that
                the job's checkpoints hold it.
            group: Its settings: learning rate, weight decay and the like.
            parameters: Those to update; ``grad`` of each is the average over the ranks.
        """
