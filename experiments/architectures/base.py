"""The base class of architectures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddltrace.experiments.architectures.transfers import Reduction, Round


class AnyArchitecture:
    """One value on the architecture axis: an `Architecture`, or a composition of several."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of exchange of encoded tensors that it supports; by default sums only."""
        return ("all_reduce",)


class Architecture(AnyArchitecture, ABC):
    """Defines which ranks exchange messages to sum a vector over all ranks.

    A plan has two halves: `reduce`, after which each element's sum is on one rank, and `spread`,
    which brings the sums to all ranks. The hierarchical architecture composes the halves."""

    @abstractmethod
    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """The first half.

        Args:
            ranks: The ranks in the architecture's order, at least one.
            elements: Number of elements of the vector.
        """

    @abstractmethod
    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """The second half, from the owners that `reduce` names to all ranks.

        Args:
            ranks: The ranks in the architecture's order, at least one.
            elements: Number of elements of the vector.
        """

    def plan(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """The rounds of a whole all-reduce.

        Args:
            ranks: The ranks in the architecture's order, at least one.
            elements: Number of elements of the vector.
        """
        return (*self.reduce(ranks, elements).rounds, *self.spread(ranks, elements))
