"""The interfaces of the rules of synchronization.

A worker's clock is the number of steps that it has pushed. In step c, from 0, its clock is c:
it reads parameters, computes a gradient and pushes it as its update c. The rules are independent of
torch, processes and time: a server asks its rule which of the received pushes and reads it may
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from ddltrace.experiments.frequency.frequency import EveryStep, StepContext, StepPolicy

Place = Literal["all", "servers", "peers", "groups"]
"""Where a rule is carried out: ``all``: every rank waits for every rank, over any architecture;
``servers``: on the servers of a parameter server; ``peers``: between ranks, without servers;
``groups``: by all-reduces within groups of ranks."""


class Synchronization(ABC):
    """One value on the synchronization axis.

    Attributes:
        place: Where the rule is carried out.
    """

    place: ClassVar[Place]

    @property
    def cycle_steps(self) -> int:
        """Steps after which its exchanges repeat; 1 if all steps have the same."""
        return 1

    def policy(self, context: StepContext) -> StepPolicy:
        """What executes it on a rank, unless servers do. Collective.

        Args:
            context: The job.
        """
        return EveryStep(context)


class ServerRule(Synchronization):
    """A rule that a server follows.

    Attributes:
        by_rounds: Whether an update is the mean of several workers' pushes of the same clock.
            If not, each push is an update, applied when it arrives.
    """

    place: ClassVar[Place] = "servers"
    by_rounds: ClassVar[bool] = False

    @abstractmethod
    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int | None:
        """How many steps a worker may be ahead of the slowest one; None: any number.

        Args:
            seconds: For each worker that still trains, the computing time of each of its last
                steps, without the time that it waited.
        """

    def round_is_complete(self, pushed: int, active: int) -> bool:
        """Whether the pushes of a round are applied now; for rules by rounds only.

        Args:
            pushed: Workers that still train and have pushed this round's update.
            active: Workers that still train.
        """
        return pushed >= active

    def history(self) -> int:
        """The number of last steps of a worker that `bound_for` needs."""
        return 1
