"""Tensor fusion as Horovod does it.

Sergeev & Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow",
arXiv 1802.05799.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import (
    Gradient,
    Message,
    MessagePlan,
    fuse,
    whole,
)
from ddltrace.experiments.schedules.base import Agreement, Dispatcher, Schedule, Untimed
from ddltrace.experiments.schedules.by_priority import MEBIBYTE
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "fusion",
    "once a cycle, all ready tensors in one message up to a threshold",
    "Horovod, arXiv 1802.05799",
)
@dataclass(frozen=True)
class Fusion(Schedule):
    """Once a cycle, all gradients that are ready leave together, up to the threshold.

    Attributes:
        threshold_mb: Largest size of a fused message in MiB (``HOROVOD_FUSION_THRESHOLD``). A
            tensor that is larger travels alone.
        cycle_ms: Time between two looks at what is ready (``HOROVOD_CYCLE_TIME``).
    """

    threshold_mb: float = 64.0
    cycle_ms: float = 5.0

    def __post_init__(self) -> None:
        if not self.threshold_mb >= 0:
            raise ValueError("threshold_mb must not be negative")
        if not 0 < self.cycle_ms < math.inf:
            raise ValueError("cycle_ms must be a positive number")

    @property
    def agreement(self) -> Agreement:
        """Rank 0 decides, as Horovod's coordinator does."""
        return "leader"

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor; what is fused is decided while the job runs."""
        return MessagePlan(gradients, [[whole(gradient)] for gradient in gradients])

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Fuses what is ready at each tick."""
        return _EachCycle(plan, self.threshold_mb * MEBIBYTE)


class _EachCycle(Untimed):
    """Gathers ready messages, and lets them go at the next tick."""

    def __init__(self, plan: MessagePlan, threshold: float) -> None:
        self._plan = plan
        self._threshold = threshold
        self._ready: list[Message] = []
        self._seen: set[int] = set()

    def gradient_ready(self, index: int) -> Sequence[Message]:
        """Gathers the gradient's message."""
        for number in self._plan.carriers[index]:
            self._gather(self._plan.messages[number])
        return ()

    def backward_ended(self) -> Sequence[Message]:
        """Gathers what got no gradient."""
        for message in self._plan.messages:
            self._gather(message)
        return ()

    def tick(self) -> Sequence[Message]:
        """Fuses all that was gathered, in the order in which it came, by element type."""
        dtypes = {index: gradient.dtype for index, gradient in self._plan.gradients.items()}
        waiting: dict[str, list[Message]] = {}
        for message in self._ready:
            waiting.setdefault(dtypes[message.slices[0].gradient], []).append(message)
        self._ready.clear()
        fused = []
        for messages in waiting.values():
            batch: list[Message] = []
            for message in messages:
                if batch and sum(m.bytes for m in batch) + message.bytes > self._threshold:
                    fused.append(fuse(batch))
                    batch = []
                batch.append(message)
            fused.append(fuse(batch))
        return fused

    def _gather(self, message: Message) -> None:
        if message.number not in self._seen:
            self._seen.add(message.number)
            self._ready.append(message)
