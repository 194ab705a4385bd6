"""What averages the gradients of one model over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets


class Exchange(ABC):
    """What averages the gradients of one model.

    Attributes:
        model: The module to call in place of the one that was attached.
    """

    model: nn.Module

    @abstractmethod
    def finish(self) -> None:
        """To be called once after every backward pass, before the optimizer's step.

        If the schedule waits before the update, every gradient is the average over the ranks
        when this returns. If it waits before the layers, this takes the gradients away: each
        layer's next forward waits for its own and updates its own parameters first.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for what is under way, applies it, and takes the exchange off the model."""


class DdpExchange(Exchange):
    """PyTorch's DistributedDataParallel, which waits inside ``backward()``."""

    def __init__(
        self, model: nn.Module, schedule: DdpBuckets, *, find_unused_parameters: bool
    ) -> None:
        self._attached = model
        self.model = DistributedDataParallel(
            model,
            bucket_cap_mb=schedule.bucket_mb,
            find_unused_parameters=find_unused_parameters,
        )

    def finish(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Gives the model back as it was attached."""
        self.model = self._attached
