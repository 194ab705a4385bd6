"""TicTac: parameters in the order in which the next forward consumes them.

Hashemi et al., "TicTac: Accelerating Distributed Deep Learning with Communication Scheduling",
MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan
from ddltrace.experiments.schedules.base import Agreement, Dispatcher, Schedule, WaitingPoint
from ddltrace.experiments.schedules.by_priority import ByPriority
from ddltrace.experiments.schedules.p3 import plan_of_slices
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "tictac",
    "whole tensors in the order in which the next forward uses them",
    "TicTac, MLSys 2019",
    needs=("an optimizer that updates each parameter by itself (not LBFGS)",),
)
@dataclass(frozen=True)
class TicTac(Schedule):
    """Whole tensors, each with the priority of its first use, the same order on all ranks.

    The order is the paper's TIC: it follows from the graph alone, here from the order in which
    the layers of the first forward pass were called. The library's all_reduce stands in for
    the paper's push to a parameter server and pull from it.
    """

    @property
    def wait(self) -> WaitingPoint:
        """Before each layer's next forward."""
        return "layer"

    @property
    def agreement(self) -> Agreement:
        """Rank 0 decides: readiness and completion are matters of time."""
        return "leader"

    @property
    def one_in_flight(self) -> bool:
        """A more urgent gradient waits for one message at most."""
        return True

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor, by the order of use."""
        return plan_of_slices(gradients, lambda gradient: max(1, gradient.elements))

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """One message at a time, the most urgent first."""
        return ByPriority(plan, credit_bytes=0)
