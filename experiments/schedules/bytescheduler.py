"""ByteScheduler: partitions by priority within a credit.

Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration",
SOSP 2019.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan
from ddltrace.experiments.schedules.base import Dispatcher, Schedule
from ddltrace.experiments.schedules.by_priority import MEBIBYTE, ByPriority
from ddltrace.experiments.schedules.p3 import ByUrgency, plan_of_slices
from ddltrace.experiments.schedules.search import BayesianSearch, Search
from ddltrace.experiments.technique import technique

_GRID_MB: Final = tuple(2.0**power for power in range(-4, 7))


@technique(
    "order",
    "bytescheduler",
    "partitions by priority, with a limit on the bytes in flight",
    "ByteScheduler, SOSP 2019",
    needs=("an optimizer that updates each parameter by itself (not LBFGS)",),
)
@dataclass(frozen=True)
class ByteScheduler(ByUrgency):
    """Partitions of `partition_mb`, by priority, with at most `credit_mb` in flight.

    Attributes:
        partition_mb: Largest size of a message in MiB; ``inf`` keeps tensors whole.
        credit_mb: Bytes in flight, in MiB; one partition always may be.
        tune: Whether partition and credit are found by Bayesian optimization while the job
            runs; what is given is then where the search begins.
    """

    partition_mb: float = 1.0
    credit_mb: float = 4.0
    tune: bool = False

    def __post_init__(self) -> None:
        if not self.partition_mb > 0:
            raise ValueError("partition_mb must be a positive number")
        if not self.credit_mb >= 0:
            raise ValueError("credit_mb must not be negative")

    @property
    def one_in_flight(self) -> bool:
        """As many messages as the credit allows."""
        return False

    @property
    def cuts_tensors(self) -> bool:
        """Tensors are cut, unless the partition has no limit."""
        return math.isfinite(self.partition_mb) or self.tune

    def search(self) -> Search | None:
        """Bayesian optimization over both parameters, 15 points as in the paper."""
        if not self.tune:
            return None
        low, high = _GRID_MB[0], _GRID_MB[-1]
        first = [min(max(value, low), high) for value in (self.partition_mb, self.credit_mb)]
        return BayesianSearch(first, list(itertools.product(_GRID_MB, _GRID_MB)), points=15)

    def with_values(self, values: Sequence[float]) -> Schedule:
        """With a partition and a credit, in MiB."""
        return ByteScheduler(partition_mb=values[0], credit_mb=values[1])

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a partition, by the order in which the next forward uses parameters."""
        return plan_of_slices(gradients, self._elements)

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """The most urgent first, as far as the credit goes."""
        return ByPriority(plan, self.credit_mb * MEBIBYTE)

    def _elements(self, gradient: Gradient) -> int:
        limit = self.partition_mb * MEBIBYTE
        if math.isinf(limit):
            return max(1, gradient.elements)
        return max(1, int(limit) // gradient.element_bytes)
