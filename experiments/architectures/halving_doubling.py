"""Recursive halving and doubling: Thakur et al., "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.transfers import (
    Ownership,
    Reduction,
    Round,
    Transfer,
    even_bounds,
    without_empty,
)
from ddltrace.experiments.technique import technique


@technique(
    "architecture",
    "halving_doubling",
    "recursive halving and doubling between pairs, on any number of ranks",
    "Thakur et al., IJHPCA 2005",
)
@dataclass(frozen=True)
class HalvingDoubling(Architecture):
    """Pairs of ranks exchange halves of their current slice in each round, then double it back.

    p = q + r ranks with q the largest power of two, n elements: r messages of n elements before
    and after; between them 2 log2(q) rounds of q messages, n / 2, n / 4, ... elements each.
    """

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Ranks beyond the power of two send their vectors to partners, then halving."""
        members, folds = _split(ranks)
        core = _Core(members, elements)
        rounds = [[Transfer(extra, kept, 0, elements, True) for extra, kept in folds]]
        distance = len(members) // 2
        while distance:
            rounds.append(
                [
                    # A place keeps the half that holds its own chunk and sends the other.
                    core.block(place, place ^ distance, distance, reduces=True)
                    for place in range(len(members))
                ]
            )
            distance //= 2
        owners = (
            Ownership(core.bounds[place], core.bounds[place + 1], rank)
            for place, rank in enumerate(members)
        )
        return Reduction(
            without_empty(rounds), tuple(owner for owner in owners if owner.start < owner.stop)
        )

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """Doubling, then the ranks beyond the power of two receive the sums."""
        members, folds = _split(ranks)
        core = _Core(members, elements)
        rounds = []
        distance = 1
        while distance < len(members):
            rounds.append(
                [
                    core.block(place, place ^ distance, distance, reduces=False)
                    for place in range(len(members))
                ]
            )
            distance *= 2
        rounds.append([Transfer(kept, extra, 0, elements, False) for extra, kept in folds])
        return without_empty(rounds)


def _split(ranks: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The ranks of the power of two, and (other rank, its partner among them)."""
    size = 1 << (len(ranks).bit_length() - 1)
    extra = len(ranks) - size
    # Neighbours are paired, because they are likely to be near each other.
    folds = [(ranks[2 * pair], ranks[2 * pair + 1]) for pair in range(extra)]
    return [*(kept for _, kept in folds), *ranks[2 * extra :]], folds


class _Core:
    """The ranks of the power of two, and the chunk of each."""

    def __init__(self, ranks: Sequence[int], elements: int) -> None:
        self.ranks = ranks
        self.bounds = even_bounds(elements, len(ranks))

    def block(self, place: int, partner: int, width: int, *, reduces: bool) -> Transfer:
        """The aligned `width` chunks that hold the partner's own chunk, or the sender's."""
        first = (partner if reduces else place) // width * width
        start, stop = self.bounds[first], self.bounds[first + width]
        return Transfer(self.ranks[place], self.ranks[partner], start, stop, reduces)
