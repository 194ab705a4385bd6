"""Plans of an all-reduce: rounds of transfers between ranks. Pure: no torch, no processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Transfer:
    """One message from one rank to another.

    Attributes:
        source: The rank that sends.
        target: The rank that receives.
        start: First element of the slice.
        stop: End of the slice, exclusive.
        reduces: True: the target adds what it receives. False: it replaces its own elements.
    """

    source: int
    target: int
    start: int
    stop: int
    reduces: bool

    @property
    def elements(self) -> int:
        """Number of transferred elements."""
        return self.stop - self.start


Round = tuple[Transfer, ...]
"""Transfers that run at the same time: each sends its source's values from before the round."""


@dataclass(frozen=True)
class Ownership:
    """A slice whose sum over all ranks is on one rank.

    Attributes:
        start: First element.
        stop: End, exclusive.
        rank: The rank that has the sum.
    """

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Reduction:
    """The first half of an all-reduce.

    Attributes:
        rounds: The transfers.
        owners: The ranks with the sums afterwards: disjoint slices in order that cover all
            elements.
    """

    rounds: tuple[Round, ...]
    owners: tuple[Ownership, ...]


def even_bounds(elements: int, parts: int) -> list[int]:
    """Bounds of `parts` slices of nearly the same size: slice i is bounds[i] to bounds[i + 1]."""
    return [elements * part // parts for part in range(parts + 1)]


def without_empty(rounds: Iterable[Iterable[Transfer]]) -> tuple[Round, ...]:
    """The rounds without transfers of no elements, and without rounds of no transfers."""
    kept = (tuple(t for t in transfers if t.elements) for transfers in rounds)
    return tuple(transfers for transfers in kept if transfers)


def side_by_side(plans: Iterable[Sequence[Round]]) -> tuple[Round, ...]:
    """Plans on different ranks or slices as one: their first rounds together, and so on."""
    return tuple(
        tuple(transfer for transfers in rounds for transfer in transfers)
        for rounds in zip_longest(*plans, fillvalue=())
    )


def moved(rounds: Sequence[Round], offset: int) -> tuple[Round, ...]:
    """The same transfers with slices that start `offset` elements later."""
    return tuple(
        tuple(
            Transfer(t.source, t.target, t.start + offset, t.stop + offset, t.reduces)
            for t in transfers
        )
        for transfers in rounds
    )
