"""Stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NeurIPS 2013."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.technique import technique

MAX_BOUND = 1000


@technique(
    "synchronization",
    "ssp",
    "a worker may be at most bound steps ahead of the slowest one",
    "Ho et al., NeurIPS 2013",
    needs=("servers in processes of their own: one, or as ps:servers=N says",),
)
@dataclass(frozen=True)
class Ssp(ServerRule):
    """A worker begins step c only if every worker has pushed at least c - bound updates.

    What it reads then holds all updates up to c - bound - 1 of every worker, and those that have
    come since.

    Attributes:
        bound: How many steps a worker may be ahead of the slowest one.
    """

    bound: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.bound <= MAX_BOUND:
            raise ValueError(f"bound must be 0 to {MAX_BOUND}")

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """The bound of the spec."""
        del seconds
        return self.bound
