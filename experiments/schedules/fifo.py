"""FIFO after backward: no overlap at all, the reference point of the survey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.schedules.base import AfterBackward, Dispatcher, Schedule
from ddltrace.experiments.technique import technique


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
