"""Executes a strategy in a real job.

Use::

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = attach(model, strategy, optimizer)
    for inputs, targets in batches:
        optimizer.zero_grad()
        criterion(exchange.model(inputs), targets).backward()
        exchange.finish()
        optimizer.step()
    exchange.close()

Gradients are averaged as DistributedDataParallel does it: each rank divides by their number,
then they are summed.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.engine.exchange import DdpExchange, Exchange
from ddltrace.experiments.engine.scheduled_exchange import ScheduledExchange
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.spec import Strategy


def attach(
    model: nn.Module,
    strategy: Strategy,
    optimizer: Optimizer,
    *,
    find_unused_parameters: bool = False,
) -> Exchange:
    """Makes a strategy average the gradients of a model.

    The parameters and buffers of rank 0 become those of all ranks. The default process group
    has to be initialized. Unlike DistributedDataParallel, schedules of our own do not send
    buffers (of batch normalization, say) again before every forward.

    Args:
        model: The model, the same on all ranks.
        strategy: What to execute.
        optimizer: What updates the model's parameters; the job goes on calling its step.
        find_unused_parameters: Whether a step may leave parameters without a gradient; as in
            DistributedDataParallel such parameters count as zero on this rank, and keep what
            they had if no rank used them. Costs one small all-reduce a step.

    Returns:
        The exchange, to be called as the module's docstring shows.
    """
    schedule = strategy.schedule
    if isinstance(schedule, DdpBuckets):
        return DdpExchange(model, schedule, find_unused_parameters=find_unused_parameters)
    return ScheduledExchange(
        model, schedule, optimizer, find_unused_parameters=find_unused_parameters
    )
