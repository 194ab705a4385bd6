"""One message a tensor: during backward (wait-free backpropagation), or after it.

Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning
on GPU Clusters", USENIX ATC 2017, section 3.1. FIFO after backward has no overlap at all: the
reference point of the survey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.schedules.base import AfterBackward, Dispatcher, InTurn, Schedule
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "wfbp",
    "one message a tensor, as soon as its gradient is ready",
    "Poseidon, ATC 2017",
)
@dataclass(frozen=True)
class WaitFree(Schedule):
    """One message a tensor, in order of creation, each as soon as its gradient is ready.

    Attributes:
        wait: ``layer`` lets communication reach into the next forward pass. Poseidon itself
            waits before the update.
    """

    wait: Literal["update", "layer"] = "update"

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor, in the order in which the gradients are created."""
        return MessagePlan(gradients, [[whole(gradient)] for gradient in gradients])

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Lets each message go as soon as its turn and its gradient have come."""
        return InTurn(plan)


@technique(
    "order",
    "fifo",
    "one message a tensor, all after backward",
    "the unoptimized reference",
)
@dataclass(frozen=True)
class Fifo(Schedule):
    """One message a tensor, in order of creation, output layer first, after backward."""

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor, in the order in which the gradients are created."""
        return MessagePlan(gradients, [[whole(gradient)] for gradient in gradients])

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Holds everything back until backward has ended."""
        return AfterBackward(plan)
