"""One-step delayed SGD: a step computes while the gradients of the previous step are in flight.

Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for Distributed Training",
ACM TACO 2020, arXiv 2005.06728.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan
from ddltrace.experiments.schedules.base import (
    AfterBackward,
    Dispatcher,
    Schedule,
    WaitingPoint,
)
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "odsgd",
    "updates one step late: a whole step of computation hides the exchange",
    "OD-SGD, arXiv 2005.06728",
    needs=("torch.optim.SGD, without a GradScaler",),
)
@dataclass(frozen=True)
class OdSgd(Schedule):
    """DDP's buckets, sent after backward and awaited at the next step's update.

    Step k + 1 computes on a local copy: the global weights after the updates through step
    k - 1, after one more step of the optimizer with this rank's own gradient of step k. The
    global weights follow synchronous SGD on the averaged gradients, one step later. The paper
    has no momentum; here the local step takes the momentum of the global weights along.

    Attributes:
        warmup: Synchronous steps before that.
    """

    optimizers: ClassVar[tuple[str, ...] | None] = ("SGD",)
    warmup: int = 5

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError("warmup must not be negative")

    @property
    def opening_steps(self) -> int:
        """The synchronous steps."""
        return self.warmup

    @property
    def wait(self) -> WaitingPoint:
        """Before the next step's update."""
        return "next_update"

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """DDP's buckets: few messages, as none can start before the others."""
        return DdpBuckets().plan(gradients)

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Starts everything when backward has ended."""
        return AfterBackward(plan)
