"""P3, slices by priority, and TicTac, whole tensors by priority.

Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019.
Hashemi et al., "TicTac: Accelerating Distributed Deep Learning with Communication Scheduling",
MLSys 2019: parameters in the order in which the next forward consumes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice
from ddltrace.experiments.schedules.base import (
    Agreement,
    Dispatcher,
    Schedule,
    WaitingPoint,
    order_of_use,
)
from ddltrace.experiments.schedules.by_priority import ByPriority
from ddltrace.experiments.technique import technique


class ByUrgency(Schedule):
    """Messages by urgency, one in flight; each layer's next forward waits for its own."""

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

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """The most urgent message first."""
        return ByPriority(plan, credit_bytes=0)


@technique(
    "order",
    "p3",
    "slices by priority, one in flight; each layer's next forward waits for its own",
    "P3, MLSys 2019",
    needs=("an optimizer that updates each parameter by itself (not LBFGS)",),
)
@dataclass(frozen=True)
class P3(ByUrgency):
    """Tensors cut into slices; the layers that the next forward needs first go first.

    One slice is in flight at a time, so a more urgent gradient waits for one slice at most.
    Each parameter is updated when it is needed, and the next forward waits layer by layer.

    Attributes:
        slice: Elements of one slice. The paper found 40,000 to 50,000 to be best.
    """

    slice: int = 50_000

    def __post_init__(self) -> None:
        if self.slice < 1:
            raise ValueError("slice must be at least 1 element")

    @property
    def cuts_tensors(self) -> bool:
        """Tensors are cut."""
        return True

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a slice, by the order in which the next forward uses the parameters."""
        return plan_of_slices(gradients, lambda _: self.slice)


def plan_of_slices(
    gradients: Sequence[Gradient], elements_of: Callable[[Gradient], int]
) -> MessagePlan:
    """Cuts gradients into slices, numbered by urgency.

    Args:
        gradients: In the order of creation.
        elements_of: The largest number of elements of a slice of a gradient.
    """
    contents = []
    priorities = []
    for priority, gradient in enumerate(order_of_use(gradients)):
        size = elements_of(gradient)
        # A tensor without elements still is one message: all of its elements have to travel.
        for start in range(0, max(1, gradient.elements), size):
            stop = min(gradient.elements, start + size)
            contents.append([Slice(gradient.index, start, stop)])
            priorities.append(priority)
    return MessagePlan(gradients, contents, priorities)


@technique(
    "order",
    "tictac",
    "whole tensors in the order in which the next forward uses them",
    "TicTac, MLSys 2019",
    needs=("an optimizer that updates each parameter by itself (not LBFGS)",),
)
@dataclass(frozen=True)
class TicTac(ByUrgency):
    """Whole tensors, each with the priority of its first use, the same order on all ranks.

    The order is the paper's TIC: it follows from the graph alone, here from the order in which
    the layers of the first forward pass were called. The library's all_reduce stands in for
    the paper's push to a parameter server and pull from it.
    """

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor, by the order of use."""
        return plan_of_slices(gradients, lambda gradient: max(1, gradient.elements))
