"""Grouped synchronization in a job: the engine averages within groups, this over all ranks."""

from __future__ import annotations

from typing import ClassVar

import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.frequency.frequency import EveryStep, StepContext
from ddltrace.experiments.frequency.parameter_exchange import ParameterExchange
from ddltrace.experiments.messages.trace_marks import mark
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.marks import mark_name

_NAME = "average of all groups"


class GroupAveraging(EveryStep):
    """Averages the parameters of all ranks after some steps."""

    acts_on_updates: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(self, rule: Grouped, context: StepContext) -> None:
        """Makes the exchange of all ranks. Collective.

        Args:
            rule: The rule, which decides when ranks average.
            context: The job; its exchange spans all ranks.
        """
        super().__init__(context)
        self._rule = rule
        self._step = 0
        self._exchange = ParameterExchange(context.parameters, context.exchange())
        self._parameters = [parameter for _, parameter in context.parameters]
        mark(mark_name("rule", spec=f"grouped:every={rule.every},size={rule.size}"))

    def after_update(self, optimizer: Optimizer) -> None:
        """Averages, if it is time."""
        del optimizer
        step, self._step = self._step, self._step + 1
        mark(mark_name("group", worker=dist.get_rank(), clock=step))
        if self._rule.averages_after(step):
            averages = self._exchange.average([p.detach() for p in self._parameters], _NAME)
            for parameter, average in zip(self._parameters, averages, strict=True):
                parameter.copy_(average)
            mark(mark_name("all", worker=dist.get_rank(), clock=step))


class ClockedSteps(EveryStep):
    """Bulk synchronous steps, with their clock in the trace."""

    def __init__(self, context: StepContext) -> None:
        """Begins at clock 0.

        Args:
            context: The job.
        """
        super().__init__(context)
        self._clock = 0
        mark(mark_name("rule", spec="bsp"))

    def before_update(self, optimizer: Optimizer) -> bool:
        """Marks the end of the step."""
        del optimizer
        mark(mark_name("step", worker=dist.get_rank(), clock=self._clock))
        self._clock += 1
        return True
