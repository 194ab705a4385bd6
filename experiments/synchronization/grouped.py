"""Grouped synchronization: groups average every step, all ranks every few steps.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, call it hierarchical local
SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddltrace.experiments.frequency.frequency import EveryStep, StepContext, StepPolicy
from ddltrace.experiments.frequency.parameter_exchange import ParameterExchange
from ddltrace.experiments.lazy_torch import dist
from ddltrace.experiments.messages.trace_marks import mark
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "synchronization",
    "grouped",
    "groups average gradients in each step, all ranks parameters every few steps",
    "Lin et al., ICLR 2020",
)
@dataclass(frozen=True)
class Grouped(Synchronization):
    """Averages gradients within groups in each step, and parameters over all ranks periodically.

    Attributes:
        size: Consecutive ranks in a group; the last group may be smaller.
        every: After how many steps the parameters of all ranks are averaged.
    """

    place: ClassVar[Place] = "groups"

    size: int = 2
    every: int = 8

    def __post_init__(self) -> None:
        if self.size < 1 or self.every < 1:
            raise ValueError("size and every must be at least 1")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.every

    def groups(self, ranks: int) -> list[list[int]]:
        """The groups.

        Args:
            ranks: Number of ranks.
        """
        return [
            list(range(start, min(start + self.size, ranks)))
            for start in range(0, ranks, self.size)
        ]

    def averages_after(self, step: int) -> bool:
        """Whether all ranks average their parameters after a step, counted from 0."""
        return (step + 1) % self.every == 0

    def policy(self, context: StepContext) -> StepPolicy:
        """Averages of all ranks; the engine averages gradients within the groups."""
        return GroupAveraging(self, context)


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
