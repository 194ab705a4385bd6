"""D-PSGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique


@technique(
    "synchronization",
    "gossip",
    "D-PSGD: ranks average parameters with their neighbours on a ring in each step",
    "Lian et al., NeurIPS 2017",
)
@dataclass(frozen=True)
class Gossip(Synchronization):
    """In each step every rank averages its parameters with those of its neighbours on a ring.

    x_i <- mean of x_j over rank i and its neighbours - update(gradient of rank i at its old x_i).
    The mean has equal weights, so the mixing matrix is doubly stochastic, and the mean of all
    ranks moves as that of synchronous SGD does. A rank waits for its neighbours only: ranks that
    are k places apart can be k steps apart.
    """

    place: ClassVar[Place] = "peers"

    def neighbours(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The ranks with which a rank averages, without itself; none if it is alone."""
        return tuple(sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank}))
