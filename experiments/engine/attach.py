"""Executes a strategy in a job that calls `attach`.

Use::

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = attach(model, strategy)
    for inputs, targets in batches:
        optimizer.zero_grad()
        criterion(exchange.model(inputs), targets).backward()
        optimizer.step()
    exchange.close()

``ddltrace run --strategy`` does the same in a job without changes to its code.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.engine.take_over import TakenOver
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.strategy import Strategy


class Exchange:
    """A model whose gradients a strategy averages.

    Attributes:
        model: The module to call in place of the model: its DistributedDataParallel.
    """

    def __init__(self, model: DistributedDataParallel, taken_over: TakenOver | None) -> None:
        self.model: nn.Module = model
        self._taken_over = taken_over

    def close(self) -> None:
        """Waits for pending messages, applies them, and removes the strategy from the model."""
        if self._taken_over is not None:
            self._taken_over.close()


def attach(
    model: nn.Module, strategy: Strategy, *, find_unused_parameters: bool = False
) -> Exchange:
    """Wraps a model in DistributedDataParallel with the communication of a strategy.

    The parameters and buffers of rank 0 become those of all ranks. The default process group
    has to be initialized.

    Args:
        model: The model, the same on all ranks.
        strategy: The strategy to execute.
        find_unused_parameters: As for DistributedDataParallel.

    Returns:
        The exchange, to be used as the module's docstring shows. Schedules that wait before the
        layers update each layer's parameters when its next forward needs them.
    """
    options: dict[str, Any] = {"find_unused_parameters": find_unused_parameters}
    if isinstance(strategy.schedule, DdpBuckets):
        options["bucket_cap_mb"] = strategy.schedule.bucket_mb
    ddp = DistributedDataParallel(model, **options)
    return Exchange(ddp, None if strategy.runs_on_reducer else TakenOver(ddp, strategy))
