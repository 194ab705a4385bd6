"""Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009."""

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
    "ring",
    "reduce-scatter and all-gather around a ring: 2 (p - 1) rounds of p messages of n / p",
    "Patarasuk and Yuan, JPDC 2009",
)
@dataclass(frozen=True)
class Ring(Architecture):
    """Reduce-scatter, then all-gather, both to the next rank.

    p ranks, n elements: 2 (p - 1) rounds, p messages of n / p elements in each.
    """

    @property
    def forms(self) -> tuple[str, ...]:
        """Encoded tensors of all ranks can travel around, too."""
        return ("all_reduce", "all_gather")

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Chunk i travels once around the ring and ends, summed, before the rank it began at."""
        size, bounds = len(ranks), even_bounds(elements, len(ranks))
        owners = (
            Ownership(bounds[chunk], bounds[chunk + 1], ranks[(chunk - 1) % size])
            for chunk in range(size)
        )
        return Reduction(
            self._rounds(ranks, bounds, first_chunk=0, reduces=True),
            tuple(owner for owner in owners if owner.start < owner.stop),
        )

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """Each sum travels once around the ring."""
        return self._rounds(ranks, even_bounds(elements, len(ranks)), first_chunk=1, reduces=False)

    @staticmethod
    def _rounds(
        ranks: Sequence[int], bounds: Sequence[int], *, first_chunk: int, reduces: bool
    ) -> tuple[Round, ...]:
        size = len(ranks)

        def transfer(step: int, place: int) -> Transfer:
            chunk = (place + first_chunk - step) % size
            return Transfer(
                ranks[place], ranks[(place + 1) % size], bounds[chunk], bounds[chunk + 1], reduces
            )

        return without_empty(
            [transfer(step, place) for place in range(size)] for step in range(size - 1)
        )
