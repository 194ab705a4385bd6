"""Collectives that execute the plans of an architecture with sends and receives."""

from __future__ import annotations

import functools
import itertools
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.auto import Auto
from ddltrace.experiments.architectures.base import AnyArchitecture, Architecture
from ddltrace.experiments.architectures.hierarchical import Hierarchical, hosts_of
from ddltrace.experiments.architectures.mesh import Mesh
from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.architectures.placement import Placement, keys_of_slices, place
from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.architectures.transfers import Ownership, Round, Transfer, without_empty
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.collectives.link_measurement import measure_links
from ddltrace.experiments.collectives.server_processes import SummingServers
from ddltrace.experiments.messages.message_exchange import Pending
from ddltrace.experiments.plan_execution import (
    Combine,
    Naming,
    OwnRound,
    PlanExecution,
    add,
    keep_larger,
    launches_of,
    rounds_of,
    unnamed,
)

TAGS: Final = 1024
"""Tags are reused after this many collectives, far more than are ever in progress."""

_FLOAT_BYTES: Final = 4

_PLANS: Final = 4096
"""Maximum number of cached plans; a job has one for each different message of its schedule."""

MessageSlices = tuple[tuple[int, int, int], ...]
"""(gradient, start, stop) of the slices in a vector, in order."""


class ArchitectureCollectives(Collectives):
    """Collectives over one architecture.

    Attributes:
        placement: Keys of a parameter server; None before `prepare`, and without one.
        links: Measured links, by which ``auto`` chooses; None for other architectures.
    """

    def __init__(self, architecture: AnyArchitecture, group: dist.ProcessGroup) -> None:
        """Determines the host of each rank if the architecture requires it; then collective.

        Args:
            architecture: The architecture whose plans are executed.
            group: The ranks.
        """
        super().__init__(group)
        self._architecture = architecture
        self._ranks = list(range(group.size()))
        self._hosts: list[list[int]] = []
        if isinstance(architecture, Hierarchical):
            self._hosts = find_hosts(group, architecture.ranks_per_host)
        self.links = measure_links(group) if isinstance(architecture, Auto) else None
        self._wire = group
        self._servers: SummingServers | None = None
        if isinstance(architecture, ParameterServer):
            self._ranks = list(range(group.size() + architecture.dedicated()))
            architecture.server_ranks(self._ranks)  # raises if there are too few workers
            if architecture.dedicated():
                self._servers = SummingServers(group, architecture.dedicated())
                self._wire = self._servers.group
        self._numbers = itertools.count()
        self.placement: Placement | None = None
        # A cache of this object's own: a decorated method would keep the object alive.
        self._rounds: Callable[[int, MessageSlices], list[OwnRound]] = functools.lru_cache(_PLANS)(
            self._make_rounds
        )

    @property
    def has_servers(self) -> bool:
        """Whether servers in processes of their own sum."""
        return self._servers is not None

    def prepare(self, sizes: Mapping[int, int]) -> None:
        """Places keys on servers, by the measured links. Collective.

        Args:
            sizes: Elements of each gradient by its index.
        """
        if isinstance(self._architecture, ParameterServer):
            servers = self._architecture.server_ranks(self._ranks)
            # Each piece is a message more, so a slow start of messages speaks for few pieces.
            links = measure_links(self.group)
            self.placement = place(sizes, len(servers), links.latency_bytes / _FLOAT_BYTES)

    def all_reduce(
        self, vector: torch.Tensor, slices: MessageSlices = (), naming: Naming = unnamed
    ) -> Pending:
        """Starts to sum a flat vector over the ranks, in place.

        Args:
            vector: This rank's elements.
            slices: The gradients' elements in the vector; a parameter server sends each key on
                its own. Without them the vector is one tensor.
            naming: Names each message in the trace.
        """
        tag = next(self._numbers) % TAGS
        if self._servers is not None and vector.numel():
            self._servers.announce(tag, vector.dtype, self._owners(vector.numel(), slices))
        return self._execute(self._rounds(vector.numel(), slices), vector, tag, naming=naming)

    def maximum(self, vector: torch.Tensor) -> None:
        """The same rounds with another operation.

        Raises:
            RuntimeError: There are dedicated servers, which only sum.
        """
        if self._servers is not None:
            raise RuntimeError("servers of their own sum only")
        tag = next(self._numbers) % TAGS
        rounds = self._rounds(vector.numel(), ())
        self._execute(rounds, vector, tag, combine=keep_larger).wait()

    def all_gather(self, received: list[torch.Tensor], data: torch.Tensor) -> Pending:
        """On a ring around it, else by direct messages."""
        vector = _joined(received)
        received[self.rank()].copy_(data)
        plan = gather_plan(self._architecture, self._ranks, data.numel())
        return self._execute(rounds_of(self.rank(), plan), vector, next(self._numbers) % TAGS)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> Pending:
        """Direct messages to all other ranks."""
        tag = next(self._numbers) % TAGS
        works: list[dist.Work | None] = []
        pieces = zip(
            torch.split(sent, list(sent_lengths)),
            torch.split(received, list(received_lengths)),
            strict=True,
        )
        for peer, (outgoing, incoming) in enumerate(pieces):
            if peer == self.rank():
                incoming.copy_(outgoing)
                continue
            if incoming.numel():
                works.append(dist.irecv(incoming, group=self.group, tag=tag, group_src=peer))
            if outgoing.numel():
                works.append(dist.isend(outgoing, group=self.group, tag=tag, group_dst=peer))
        return _All(works)

    def close(self) -> None:
        """Ends the servers."""
        if self._servers is not None:
            self._servers.close()

    def _execute(
        self,
        rounds: Sequence[OwnRound],
        vector: torch.Tensor,
        tag: int,
        *,
        combine: Combine = add,
        naming: Naming = unnamed,
    ) -> PlanExecution:
        send, receive = launches_of(self._wire, tag, naming)
        return PlanExecution(rounds, vector, send=send, receive=receive, combine=combine)

    def _make_rounds(self, elements: int, slices: MessageSlices) -> list[OwnRound]:
        return rounds_of(self.rank(), self._plan(elements, slices))

    def _plan(self, elements: int, slices: MessageSlices) -> tuple[Round, ...]:
        architecture = self._architecture
        if isinstance(architecture, Hierarchical):
            return architecture.plan(self._hosts, elements)
        if isinstance(architecture, Auto):
            assert self.links is not None
            # Chosen by the size in float32, because plans are in elements.
            chosen = self.links.choose(elements, 4).name
            return self.links.plan(chosen, elements)
        if isinstance(architecture, ParameterServer):
            owners = self._owners(elements, slices)
            return (
                *architecture.push(self._ranks, owners),
                *architecture.pull(self._ranks, owners),
            )
        assert isinstance(architecture, Architecture)
        return architecture.plan(self._ranks, elements)

    def _owners(self, elements: int, slices: MessageSlices) -> Sequence[Ownership]:
        """The keys of a vector, each with the rank of its server."""
        assert isinstance(self._architecture, ParameterServer)
        if self.placement is None or not slices:
            return self._architecture.owners(self._ranks, elements)
        servers = self._architecture.server_ranks(self._ranks)
        return [
            Ownership(start, stop, servers[server])
            for start, stop, server in keys_of_slices(self.placement, slices)
        ]


class _All:
    """Several messages in progress."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            assert work is not None
            work.wait()


def gather_plan(
    architecture: AnyArchitecture, ranks: Sequence[int], length: int
) -> tuple[Round, ...]:
    """The rounds of an all-gather: rank i's block is i * length to (i + 1) * length.

    Args:
        architecture: A ring or a mesh; a parameter server that is sharded over the workers sends
            what it has encoded again as a mesh does.
        ranks: The ranks in order.
        length: Elements of one block.
    """
    size = len(ranks)
    if isinstance(architecture, Ring):
        return without_empty(
            [
                _block((place - step) % size, length, ranks[place], ranks[(place + 1) % size])
                for place in range(size)
            ]
            for step in range(size - 1)
        )
    assert isinstance(architecture, Mesh | ParameterServer), "the rules let no other through"
    return without_empty(
        [
            [
                _block(place, length, ranks[place], target)
                for place in range(size)
                for target in ranks
                if target != ranks[place]
            ]
        ]
    )


def _block(number: int, length: int, source: int, target: int) -> Transfer:
    return Transfer(source, target, number * length, (number + 1) * length, False)


def _joined(received: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one buffer that consecutive views share."""
    first = received[0]
    total = sum(tensor.numel() for tensor in received)
    return first.as_strided((total,), (1,), first.storage_offset())


def find_hosts(group: dist.ProcessGroup, ranks_per_host: int | None) -> list[list[int]]:
    """The ranks of each host, in the order of hosts' first ranks. Collective.

    Args:
        group: The ranks; the result has their numbers in this group.
        ranks_per_host: Consecutive ranks that count as one host; None to ask for host names.
    """
    if ranks_per_host is not None:
        return hosts_of(range(group.size()), ranks_per_host)
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    hosts: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())
