"""Merged-gradient wait-free backpropagation: small gradients share a message where that is faster.

Shi, Chu & Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms", INFOCOM 2019, arXiv 1811.11141, section 4 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice, whole
from ddltrace.experiments.schedules.base import AfterBackward, Dispatcher, InTurn, Schedule
from ddltrace.experiments.schedules.by_priority import MEBIBYTE
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "mgwfbp",
    "merges gradients if waiting for the next costs less than the start of a message",
    "MG-WFBP, arXiv 1811.11141",
    needs=("some 6 steps to measure when gradients are ready",),
)
@dataclass(frozen=True)
class MgWfbp(Schedule):
    """Merges consecutive gradients if waiting costs less than the start of a further message.

    A message of n bytes takes ``alpha + beta * n``. A gradient joins the message before it if
    the message, when it could start, would wait for the gradient for less than alpha.

    The job's first steps measure when each gradient is ready. They send one message a tensor
    after backward, so that communication does not delay the computation that is measured.

    Attributes:
        steps: Measured steps. The job's first step comes before them and is not measured.
        alpha_us: Start-up time of a message in microseconds; None: measured on this network.
        beta_us_per_mb: Time that each further MiB takes, in microseconds; None: measured.
    """

    steps: int = 5
    alpha_us: float | None = None
    beta_us_per_mb: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")
        for name in ("alpha_us", "beta_us_per_mb"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must not be negative")

    @property
    def timed_steps(self) -> int:
        """Measured steps."""
        return self.steps

    def with_values(self, values: Sequence[float]) -> Schedule:
        """With measured times of messages, where none were given.

        Args:
            values: Alpha in microseconds, and beta in microseconds a MiB.
        """
        alpha, beta = values
        return replace(
            self,
            alpha_us=alpha if self.alpha_us is None else self.alpha_us,
            beta_us_per_mb=beta if self.beta_us_per_mb is None else self.beta_us_per_mb,
        )

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """The merged messages; one message a tensor as long as something is not measured."""
        if self.alpha_us is None or self.beta_us_per_mb is None or not _timed(gradients):
            return MessagePlan(gradients, [[whole(gradient)] for gradient in gradients])
        groups = merge(gradients, self.alpha_us, self.beta_us_per_mb / MEBIBYTE)
        return MessagePlan(gradients, groups)

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Lets each message go as soon as its turn and its gradients have come."""
        return InTurn(plan) if _timed(list(plan.gradients.values())) else AfterBackward(plan)


def merge(gradients: Sequence[Gradient], alpha: float, beta: float) -> list[list[Slice]]:
    """The slices of each message after merging.

    Args:
        gradients: In the order of creation, with the times at which they are ready.
        alpha: Start-up time of a message in microseconds.
        beta: Time that each byte takes, in microseconds.

    Returns:
        Whole gradients, in their order. Element types are not mixed.
    """
    messages: list[list[Slice]] = []
    link_free = ready = start = -math.inf
    size = 0
    last: Gradient | None = None
    for gradient in gradients:
        # Messages start in order: none can start before all earlier gradients are ready.
        ready = max(ready, gradient.ready_us or 0.0)
        joins = last is not None and last.dtype == gradient.dtype
        if joins and max(0.0, ready - start) < alpha:
            messages[-1].append(whole(gradient))
            start = max(start, ready)
            size += gradient.bytes
        else:
            if last is not None:
                link_free = start + alpha + beta * size
            messages.append([whole(gradient)])
            start = max(link_free, ready)
            size = gradient.bytes
        last = gradient
    return messages


def _timed(gradients: Sequence[Gradient]) -> bool:
    return all(gradient.ready_us is not None for gradient in gradients)
