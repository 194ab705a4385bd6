"""How tokens travel to the ranks of their experts and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Sizes = list[list[int]]
"""Rows from each rank (first index) to each rank."""

Pair = tuple[int, int]
"""The rank that sends rows, and the one that they are for."""


class TokenExchange(ABC):
    """Sends rows between all ranks. Rows of one rank stay in their order."""

    @abstractmethod
    def plan(self, counts: torch.Tensor) -> TokenPlan:
        """Tells all ranks what they will receive. Collective.

        Args:
            counts: Tokens of this rank for each expert; ranks have consecutive experts.
        """


class TokenPlan(ABC):
    """One batch of tokens on its way.

    Attributes:
        received: Tokens from each rank (row) for each expert of this rank.
    """

    received: torch.Tensor

    @abstractmethod
    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows to the experts' ranks, ordered by rank. Collective.

        Returns:
            The rows for this rank, ordered by the rank that sent them.
        """

    @abstractmethod
    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows in the order of `there`'s result to where they came from. Collective."""


class DirectExchange(TokenExchange):
    """One all-to-all: each rank sends a message to each other."""

    def plan(self, counts: torch.Tensor) -> TokenPlan:
        """One all-to-all of the counts."""
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        return _DirectPlan(counts, incoming.view(dist.get_world_size(), -1))


class _DirectPlan(TokenPlan):
    def __init__(self, counts: torch.Tensor, received: torch.Tensor) -> None:
        self.received = received
        self._to = counts.view(len(received), -1).sum(1).tolist()
        self._from = received.sum(1).tolist()

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return _all_to_all(rows, self._to, self._from)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return _all_to_all(rows, self._from, self._to)


class HierarchicalExchange(TokenExchange):
    """Between the ranks of each host, then between hosts, one message for each pair of hosts.

    For each other host, one rank of a host collects what all its ranks send there, sends it as one
    message to one rank there, and that one spreads it over its host. The ranks of a host take turns
    in this, by the other host's number.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        """Makes a process group for each host. Collective.

        Args:
            hosts: The ranks of each host, ascending.
        """
        self.rank, self.hosts = dist.get_rank(), hosts
        self.host = next(n for n, ranks in enumerate(hosts) if self.rank in ranks)
        groups = [dist.new_group(list(ranks), group_desc="ddltrace:host") for ranks in hosts]
        self.group = groups[self.host]

    def plan(self, counts: torch.Tensor) -> TokenPlan:
        """One all-gather of the counts: who forwards tokens has to know them, too."""
        ranks = dist.get_world_size()
        gathered = counts.new_empty(ranks * len(counts))
        dist.all_gather_into_tensor(gathered, counts)
        return _HierarchicalPlan(self, gathered.view(ranks, ranks, -1))

    def carrier(self, host: int, other: int) -> int:
        """The rank of a host that sends to and receives from another host."""
        return self.hosts[host][other % len(self.hosts[host])]

    def send(self, rows: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Sends this rank's rows. Collective.

        Args:
            rows: Rows ordered by the rank to which they go.
            sizes: Rows from each rank to each rank.

        Returns:
            The rows for this rank, ordered by the rank from which they come.
        """
        here = self.hosts[self.host]
        others = [number for number in range(len(self.hosts)) if number != self.host]

        def to_hosts(sender: int, carrier: int) -> list[Pair]:
            return [(sender, carrier)] + [
                (sender, receiver)
                for other in others
                if self.carrier(self.host, other) == carrier
                for receiver in self.hosts[other]
            ]

        def from_hosts(carrier: int, receiver: int) -> list[Pair]:
            return [
                (sender, receiver)
                for other in others
                if self.carrier(self.host, other) == carrier
                for sender in self.hosts[other]
            ]

        parts = torch.split(rows, sizes[self.rank])
        held = {(self.rank, receiver): part for receiver, part in enumerate(parts)}
        held |= self._inside(rows[:0], held, sizes, to_hosts)
        works, messages = [], []
        for other in others:
            if self.carrier(self.host, other) != self.rank:
                continue
            peer = self.carrier(other, self.host)
            message = torch.cat([held[one, far] for one in here for far in self.hosts[other]])
            coming = [(far, one) for far in self.hosts[other] for one in here]
            lengths = [sizes[far][one] for far, one in coming]
            arrival = rows.new_empty(sum(lengths), *rows.shape[1:])
            # Both know the sizes: nothing is sent where there is nothing. The receive comes first:
            # Gloo announces it on the connection that carries the data.
            works += [dist.irecv(arrival, peer)] if len(arrival) else []
            works += [dist.isend(message, peer)] if len(message) else []
            messages.append(message)  # it lives until it is sent
            held |= zip(
                coming, torch.split(arrival, lengths), strict=True
            )  # views of what will arrive
        for work in works:
            assert work is not None
            work.wait()
        if others:
            held |= self._inside(rows[:0], held, sizes, from_hosts)
        return torch.cat([held[sender, self.rank] for sender in range(len(sizes))])

    def _inside(
        self,
        empty: torch.Tensor,
        held: dict[Pair, torch.Tensor],
        sizes: Sizes,
        given: Callable[[int, int], list[Pair]],
    ) -> dict[Pair, torch.Tensor]:
        """One all-to-all inside this host; returns what this rank receives.

        Args:
            empty: No rows, of the right form.
            held: Rows that this rank has, by who sends them and whom they are for.
            sizes: Rows from each rank to each rank.
            given: Which of them one rank of this host gives to another.
        """
        here = self.hosts[self.host]
        outgoing = [given(self.rank, other) for other in here]
        incoming = [given(other, self.rank) for other in here]
        message = torch.cat([empty, *(held[pair] for pairs in outgoing for pair in pairs)])
        sent, received = (
            [sum(sizes[sender][receiver] for sender, receiver in pairs) for pairs in each]
            for each in (outgoing, incoming)
        )
        arrived = _all_to_all(message, sent, received, self.group)
        order = [pair for pairs in incoming for pair in pairs]
        lengths = [sizes[sender][receiver] for sender, receiver in order]
        return dict(zip(order, torch.split(arrived, lengths), strict=True))


class _HierarchicalPlan(TokenPlan):
    def __init__(self, exchange: HierarchicalExchange, counts: torch.Tensor) -> None:
        """Takes the tokens from each rank to each rank and expert there."""
        self.received = counts[:, exchange.rank]
        self._exchange = exchange
        to_experts = counts.sum(2)
        self._there: Sizes = to_experts.tolist()
        self._back: Sizes = to_experts.T.tolist()

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return self._exchange.send(rows, self._there)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        return self._exchange.send(rows, self._back)


def _all_to_all(
    rows: torch.Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
