"""Executes one rank's part of a plan with sends and receives of any message library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.transfers import Round, Transfer

Naming = Callable[[Transfer], AbstractContextManager[None]]
"""Names in the trace the messages that are launched inside."""
Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""Combines the first tensor with the second, in place."""


class Launched(Protocol):
    """A send or receive that was launched."""

    def wait(self) -> object:
        """Blocks until it is complete."""


Launch = Callable[[torch.Tensor, Transfer], Launched]
"""Launches a send of a tensor's values, or a receive into a tensor."""


def launches_of(
    group: dist.ProcessGroup, tag: int, naming: Naming | None = None
) -> tuple[Launch, Launch]:
    """The send and the receive of a process group.

    Args:
        group: Carries the messages; ranks of transfers are places in it.
        tag: Tag of all messages; concurrent executions need different tags.
        naming: Names each message in the trace; by default names stay as they are.
    """
    name = naming or unnamed

    def send(values: torch.Tensor, transfer: Transfer) -> Launched:
        with name(transfer):
            return _work(dist.isend(values, group=group, tag=tag, group_dst=transfer.target))

    def receive(into: torch.Tensor, transfer: Transfer) -> Launched:
        with name(transfer):
            return _work(dist.irecv(into, group=group, tag=tag, group_src=transfer.source))

    return send, receive


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None: this rank is not in the group
    return work


def unnamed(transfer: Transfer) -> AbstractContextManager[None]:
    """Leaves the names as they are."""
    del transfer
    return contextlib.nullcontext()


def add(total: torch.Tensor, received: torch.Tensor) -> None:
    """The sum."""
    total.add_(received)


def keep_larger(largest: torch.Tensor, received: torch.Tensor) -> None:
    """The maximum of each element."""
    torch.maximum(largest, received, out=largest)


@dataclass(frozen=True)
class OwnRound:
    """One rank's part of one round.

    Attributes:
        sends: Transfers that it sends.
        receives: Transfers that it receives, by source, so that all ranks sum in the same order.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


def rounds_of(rank: int, plan: Sequence[Round]) -> list[OwnRound]:
    """One rank's part of a plan, without the rounds in which it does nothing."""
    own = (
        OwnRound(
            tuple(t for t in transfers if t.source == rank),
            tuple(sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)),
        )
        for transfers in plan
    )
    return [each for each in own if each.sends or each.receives]


class PlanExecution:
    """Executes a plan on one rank: the first round starts immediately, the others in `wait`."""

    def __init__(
        self,
        rounds: Sequence[OwnRound],
        vector: torch.Tensor,
        *,
        send: Launch,
        receive: Launch,
        combine: Combine = add,
    ) -> None:
        """Launches the first round.

        Args:
            rounds: This rank's part of the plan.
            vector: This rank's elements, flat and contiguous; the result replaces them.
            send: Launches the send of a slice of `vector`.
            receive: Launches a receive.
            combine: Combines own elements with received ones.
        """
        self._rounds = rounds
        self._vector = vector
        self._send = send
        self._receive = receive
        self._combine = combine
        self._next = 0
        self._works: list[Launched] = []
        self._received: list[tuple[Transfer, torch.Tensor]] = []
        self._launch()

    def wait(self) -> None:
        """Runs all rounds to their end."""
        while self._works:
            for work in self._works:
                work.wait()
            self._works = []
            for transfer, values in self._received:
                self._combine(self._vector[transfer.start : transfer.stop], values)
            self._received = []
            self._launch()

    def _launch(self) -> None:
        if self._next == len(self._rounds):
            return
        current = self._rounds[self._next]
        self._next += 1
        for transfer in current.receives:
            target = self._vector[transfer.start : transfer.stop]
            if transfer.reduces:
                target = torch.empty_like(target)
                self._received.append((transfer, target))
            self._works.append(self._receive(target, transfer))
        for transfer in current.sends:
            source = self._vector[transfer.start : transfer.stop]
            self._works.append(self._send(source, transfer))
