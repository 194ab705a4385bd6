"""Parameter server: Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI 2014. Here in its synchronous role: servers sum what all workers push, then workers pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.architectures.base import Architecture
from ddltrace.experiments.architectures.placement import place
from ddltrace.experiments.architectures.transfers import (
    Ownership,
    Reduction,
    Round,
    Transfer,
    without_empty,
)
from ddltrace.experiments.technique import technique

MAX_SERVERS = 64
SERVER_DIED = "of the parameter server has died"
"""Part of the line that reports a dead server."""


@technique(
    "architecture",
    "ps",
    "parameter server: workers push keys to servers and pull their sums",
    "Parameter Server, OSDI 2014",
)
@dataclass(frozen=True)
class ParameterServer(Architecture):
    """Keys on servers; each worker pushes every key, and pulls its sum.

    w workers, k keys, n elements: 2 rounds (push, pull). Dedicated servers: w messages for each
    key in each round, w n elements. Sharded: w - 1 messages for each key, (w - 1) n elements.

    Attributes:
        servers: How many servers there are; by default 1, or every worker if sharded.
        sharded: Whether workers are the servers; else servers are processes of their own.
    """

    servers: int | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.servers is not None and not 1 <= self.servers <= MAX_SERVERS:
            raise ValueError(f"servers must be 1 to {MAX_SERVERS}")

    @property
    def forms(self) -> tuple[str, ...]:
        """A worker that serves one shard can decode received payloads and encode the average
        again."""
        return (
            ("all_reduce", "all_to_all")
            if self.sharded and self.servers is None
            else ("all_reduce",)
        )

    def dedicated(self) -> int:
        """Number of processes beside the workers."""
        return 0 if self.sharded else self.servers or 1

    def server_ranks(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that are servers.

        Args:
            ranks: All ranks; dedicated servers stand at the end.

        Raises:
            ValueError: There are fewer workers than shards, or no worker beside the servers.
        """
        dedicated = self.dedicated()
        if dedicated:
            if len(ranks) <= dedicated:
                raise ValueError(f"{dedicated} servers need at least {dedicated + 1} ranks")
            return list(ranks[-dedicated:])
        servers = self.servers or len(ranks)
        if servers > len(ranks):
            raise ValueError(f"{servers} shards need at least as many workers, not {len(ranks)}")
        return list(ranks[:servers])

    def check_ranks(self, ranks: int) -> None:
        """Checks whether so many workers are enough.

        Raises:
            ValueError: They are not.
        """
        self.server_ranks(range(ranks + self.dedicated()))

    def workers(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that have gradients."""
        return list(ranks[: len(ranks) - self.dedicated()])

    def reduce(self, ranks: Sequence[int], elements: int) -> Reduction:
        """Pushes. The vector counts as one tensor, which is cut evenly.

        Args:
            ranks: The workers, then the dedicated servers, whose own vectors have to be zero.
            elements: Number of elements of the vector.
        """
        owners = self.owners(ranks, elements)
        return Reduction(self.push(ranks, owners), owners)

    def spread(self, ranks: Sequence[int], elements: int) -> tuple[Round, ...]:
        """Pulls; arguments as in `reduce`."""
        return self.pull(ranks, self.owners(ranks, elements))

    def owners(self, ranks: Sequence[int], elements: int) -> tuple[Ownership, ...]:
        """The keys of a vector that is one tensor, with their servers."""
        servers = self.server_ranks(ranks)
        keys = place({0: elements}, len(servers)).keys
        return tuple(Ownership(key.start, key.stop, servers[key.server]) for key in keys)

    def push(self, ranks: Sequence[int], owners: Sequence[Ownership]) -> tuple[Round, ...]:
        """Every worker sends every key to its server."""
        workers = self.workers(ranks)
        return without_empty(
            [
                [
                    Transfer(worker, owner.rank, owner.start, owner.stop, True)
                    for worker in workers
                    for owner in owners
                    if worker != owner.rank
                ]
            ]
        )

    def pull(self, ranks: Sequence[int], owners: Sequence[Ownership]) -> tuple[Round, ...]:
        """Every server sends the sums of its keys to every worker."""
        workers = self.workers(ranks)
        return without_empty(
            [
                [
                    Transfer(owner.rank, worker, owner.start, owner.stop, False)
                    for owner in owners
                    for worker in workers
                    if worker != owner.rank
                ]
            ]
        )
