"""The bucket size that is best for this job on this network, found by measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan
from ddltrace.experiments.schedules.base import Dispatcher, Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.search import GridSearch, Search
from ddltrace.experiments.technique import technique

_CANDIDATES_MB: Final = (0.25, 1.0, 4.0, 10.0, 25.0, 100.0)


@technique(
    "order",
    "best_buckets",
    "DDP's buckets of the size that is fastest for this job here, found by measurement",
    "requested by PyTorch's users: pytorch#118421, pytorch#39022",
    needs=("some 40 steps to measure the candidates",),
)
@dataclass(frozen=True)
class BestBuckets(Schedule):
    """DDP's buckets, of each of several sizes for some steps, then of the fastest size.

    Attributes:
        steps: Measured steps of each candidate.
    """

    steps: int = 5

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")

    @property
    def search_steps(self) -> int:
        """Measured steps of each candidate."""
        return self.steps

    def search(self) -> Search:
        """Tries every size."""
        return GridSearch([(size,) for size in _CANDIDATES_MB])

    def with_values(self, values: Sequence[float]) -> Schedule:
        """Buckets of one size."""
        return DdpBuckets(bucket_mb=values[0])

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """DDP's own buckets, until the search has begun."""
        return DdpBuckets().plan(gradients)

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Lets each bucket go in turn."""
        return DdpBuckets().dispatcher(plan)
