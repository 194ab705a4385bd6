"""Rules by which workers proceed in rounds.

Bulk synchronous parallel: Valiant, "A Bridging Model for Parallel Computation", CACM 1990. Backup
workers: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv 1604.00981.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddltrace.experiments.frequency.frequency import EveryStep, StepContext, StepPolicy
from ddltrace.experiments.lazy_torch import dist
from ddltrace.experiments.messages.trace_marks import mark
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import Place, ServerRule
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "synchronization",
    "bsp",
    "every rank waits for every gradient of the step; the default",
    "Valiant, CACM 1990",
)
@dataclass(frozen=True)
class Bsp(ServerRule):
    """Step c + 1 starts on every worker when the updates c of all workers are applied, as one."""

    place: ClassVar[Place] = "all"
    by_rounds: ClassVar[bool] = True

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """No worker runs ahead."""
        del seconds
        return 0

    def policy(self, context: StepContext) -> StepPolicy:
        """Averages of gradients, with the clock in the trace."""
        return ClockedSteps(context)


@technique(
    "synchronization",
    "backup",
    "each update takes the first gradients of its round; those of the last workers are dropped",
    "Chen et al., arXiv 1604.00981",
    needs=("servers in processes of their own: one, or as ps:servers=N says",),
)
@dataclass(frozen=True)
class Backup(ServerRule):
    """Each update is the mean of the first pushes of its round; those of the last are dropped.

    A worker whose push came too late continues with the round that the servers have reached.

    Attributes:
        workers: Number of workers that a round does not wait for.
    """

    by_rounds: ClassVar[bool] = True

    workers: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError("workers must be at least 1")

    def check_ranks(self, ranks: int) -> None:
        """Checks whether a round has a worker to wait for.

        Raises:
            ValueError: It has none.
        """
        if self.workers >= ranks:
            raise ValueError(
                f"with backup:workers={self.workers}, no worker of {ranks} is left for which a "
                "round waits; choose fewer backup workers, or asp"
            )

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """No worker runs ahead of the rounds."""
        del seconds
        return 0

    def round_is_complete(self, pushed: int, active: int) -> bool:
        """Whether all but `workers` have pushed, and one at least."""
        return pushed >= max(1, active - self.workers)


class ClockedSteps(EveryStep):
    """Bulk synchronous steps, with their clock in the trace."""

    def __init__(self, context: StepContext) -> None:
        """Begins at clock 0.

        Args:
            context: The job.
        """
        super().__init__(context)
        self._clock = 0
        mark(mark_name("rule", spec="bsp"))

    def before_update(self, optimizer: Optimizer) -> bool:
        """Marks the end of the step."""
        del optimizer
        mark(mark_name("step", worker=dist.get_rank(), clock=self._clock))
        self._clock += 1
        return True
