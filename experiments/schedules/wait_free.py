"""Wait-free backpropagation: a gradient is sent as soon as it is ready.

Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning
on GPU Clusters", USENIX ATC 2017, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.schedules.base import Dispatcher, InTurn, Schedule
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
