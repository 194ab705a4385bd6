"""PyTorch's own DistributedDataParallel: gradients gathered into buckets of a given size.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2.3. In a job, PyTorch's reducer itself executes this schedule, so that the baseline is
the original implementation; `plan` describes the messages of that reducer for replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice, whole
from ddltrace.experiments.schedules.base import Dispatcher, InTurn, Schedule
from ddltrace.experiments.schedules.search import GridSearch, Search
from ddltrace.experiments.technique import technique

_DEFAULT_CAP_MB = 25.0
_DEFAULT_FIRST_BUCKET_BYTES = 1 << 20
_LARGEST_MB = float(1 << 40)


@technique(
    "order",
    "ddp",
    "PyTorch's DistributedDataParallel with its buckets",
    "PyTorch Distributed, VLDB 2020",
)
@dataclass(frozen=True)
class DdpBuckets(Schedule):
    """Buckets of up to `bucket_mb`, each sent in turn when its last gradient is ready.

    Attributes:
        bucket_mb: ``bucket_cap_mb`` of DistributedDataParallel, in MiB. None is PyTorch's
            default: 25 with a first bucket of 1 MiB. A value that is given holds for the
            first bucket, too.
    """

    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and not 0 < self.bucket_mb <= _LARGEST_MB:
            raise ValueError(f"bucket_mb must be a positive number up to {_LARGEST_MB:.0f}")

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """The buckets from the second step on, when the reducer has seen the order.

        A bucket is closed by the tensor that fills it, so it may be larger than its cap, and
        every element type has buckets of its own.
        """
        limits = self._limits()
        closed: list[list[Slice]] = []
        opened: dict[str, list[Slice]] = {}
        filled: dict[str, int] = {}
        rank_of_limit: dict[str, int] = {}
        for gradient in gradients:
            key = gradient.dtype
            opened.setdefault(key, []).append(whole(gradient))
            filled[key] = filled.get(key, 0) + gradient.bytes
            limit = limits[min(rank_of_limit.get(key, 0), len(limits) - 1)]
            if filled[key] >= limit:
                closed.append(opened.pop(key))
                filled[key] = 0
                rank_of_limit[key] = rank_of_limit.get(key, 0) + 1
        return MessagePlan(gradients, [*closed, *opened.values()])

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Lets each bucket go in turn, as the reducer does."""
        return InTurn(plan)

    def _limits(self) -> list[int]:
        if self.bucket_mb is None:
            return [_DEFAULT_FIRST_BUCKET_BYTES, int(_DEFAULT_CAP_MB * (1 << 20))]
        return [int(self.bucket_mb * (1 << 20))]


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
