"""AD-PSGD: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
ICML 2018."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique


@technique(
    "synchronization",
    "adpsgd",
    "AD-PSGD: ranks average parameters in pairs at any time, without waiting for each other",
    "Lian et al., ICML 2018",
)
@dataclass(frozen=True)
class AdPsgd(Synchronization):
    """Active ranks average with one passive rank at a time, and no rank waits for a computation.

    Ranks of even number are active: in each step one sends its parameters to a passive rank of
    its choice, and both continue with the mean. Passive ranks answer at any time, also while they
    compute. No two ranks of a kind average, so that they cannot wait for each other in a circle.
    The gradient of a step is taken where its forward pass read the parameters, and applied to what
    they are by then.
    """

    place: ClassVar[Place] = "peers"

    def is_active(self, rank: int) -> bool:
        """Whether a rank chooses its partners."""
        return rank % 2 == 0

    def partners(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The ranks with which a rank may average."""
        return tuple(range(1 - rank % 2, ranks, 2))

    def partner(self, rank: int, ranks: int, clock: int) -> int:
        """The passive rank that an active one chooses in a step.

        Args:
            rank: An active rank.
            ranks: Number of ranks, at least 2.
            clock: Number of the step.
        """
        return random.Random(rank * 1_000_003 + clock).choice(self.partners(rank, ranks))
