"""The interface of collectives, and its implementation by the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.message_exchange import Pending


class Collectives(ABC):
    """Collectives of one group of ranks.

    All ranks have to call the methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Stores the group.

        Args:
            group: The ranks.
        """
        self.group = group

    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    @abstractmethod
    def all_reduce(self, vector: torch.Tensor) -> Pending:
        """Starts to sum a flat vector over the ranks, in place."""

    @abstractmethod
    def maximum(self, vector: torch.Tensor) -> None:
        """Replaces each element of a flat vector by the largest of all ranks; blocks."""

    @abstractmethod
    def all_gather(self, received: list[torch.Tensor], data: torch.Tensor) -> Pending:
        """Starts to send a flat tensor to all ranks.

        Args:
            received: One tensor of the data's size for each rank; views of one buffer, in order.
            data: What this rank sends.
        """

    @abstractmethod
    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        """Starts to send a piece to each rank.

        Args:
            received: Receives the pieces of all ranks, concatenated.
            sent: The pieces for all ranks, concatenated.
            received_lengths: Elements from each rank.
            sent_lengths: Elements to each rank.
        """

    def close(self) -> None:  # noqa: B027 - most implementations have no resources
        """Releases resources; no collective may be in progress."""


class LibraryCollectives(Collectives):
    """The collectives of the group's own backend."""

    def all_reduce(self, vector: torch.Tensor) -> Pending:
        """One all_reduce."""
        return _started(dist.all_reduce(vector, group=self.group, async_op=True))

    def maximum(self, vector: torch.Tensor) -> None:
        """One all_reduce."""
        dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self.group)

    def all_gather(self, received: list[torch.Tensor], data: torch.Tensor) -> Pending:
        """One all_gather."""
        return _started(dist.all_gather(received, data, group=self.group, async_op=True))

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        """One all_to_all_single."""
        return _started(
            dist.all_to_all_single(
                received,
                sent,
                list(received_lengths),
                list(sent_lengths),
                group=self.group,
                async_op=True,
            )
        )


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
