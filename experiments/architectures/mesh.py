"""Mesh: every rank exchanges with every other rank directly."""

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
    "mesh",
    "all to all, in two rounds of p (p - 1) messages of n / p",
    "direct reduce-scatter and all-gather",
)
@dataclass(frozen=True)
class Mesh(Architecture):
    """All to all: each rank sums one chunk that all others send it, and sends the sum to all.

    p ranks, n elements: 2 rounds, p (p - 1) messages of n / p elements in each.
    """

    @property
    def forms(self) -> tuple[str, ...]:
        """Every form is made of direct messages."""
        return ("all_reduce", "all_gather", "all_to_all")

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Every rank sends chunk i to rank i."""
        owners = _owners(ranks, elements)
        return Reduction(
            without_empty(
                [
                    [
                        Transfer(source, owner.rank, owner.start, owner.stop, True)
                        for source in ranks
                        for owner in owners
                        if source != owner.rank
                    ]
                ]
            ),
            owners,
        )

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """Every rank sends its sum to all others."""
        return without_empty(
            [
                [
                    Transfer(owner.rank, target, owner.start, owner.stop, False)
                    for owner in _owners(ranks, elements)
                    for target in ranks
                    if target != owner.rank
                ]
            ]
        )


def _owners(ranks: Sequence[int], elements: int) -> tuple[Ownership, ...]:
    bounds = even_bounds(elements, len(ranks))
    owners = (Ownership(bounds[place], bounds[place + 1], rank) for place, rank in enumerate(ranks))
    return tuple(owner for owner in owners if owner.start < owner.stop)
