"""Binomial tree: a reduction to one rank and a broadcast from it, as in MPICH."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.transfers import (
    Ownership,
    Reduction,
    Round,
    Transfer,
    without_empty,
)
from ddltrace.experiments.technique import technique


@technique(
    "architecture",
    "tree",
    "up and down a binomial tree: 2 (p - 1) messages of n",
    "Thakur et al., IJHPCA 2005",
)
@dataclass(frozen=True)
class Tree(Architecture):
    """Sums go up a binomial tree to the first rank and come down again.

    p ranks, n elements: 2 ceil(log2 p) rounds, 2 (p - 1) messages of n elements.
    """

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Every rank but the first sends once."""
        rounds = []
        distance = 1
        while distance < len(ranks):
            rounds.append(
                [
                    Transfer(ranks[place + distance], ranks[place], 0, elements, True)
                    for place in range(0, len(ranks) - distance, 2 * distance)
                ]
            )
            distance *= 2
        owners = (Ownership(0, elements, ranks[0]),) if elements else ()
        return Reduction(without_empty(rounds), owners)

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """The same tree, downwards."""
        return tuple(
            tuple(Transfer(t.target, t.source, t.start, t.stop, False) for t in transfers)
            for transfers in reversed(self.reduce(ranks, elements).rounds)
        )
