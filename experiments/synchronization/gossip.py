"""D-PSGD: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ddltrace.experiments.frequency.frequency import ParametersApart, StepContext, StepPolicy
from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.trace_marks import carrying, mark, region
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique
from ddltrace.tracer.errors import MissingCapabilityError

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "synchronization",
    "gossip",
    "D-PSGD: ranks average parameters with their neighbours on a ring in each step",
    "Lian et al., NeurIPS 2017",
)
@dataclass(frozen=True)
class Gossip(Synchronization):
    """In each step every rank averages its parameters with those of its neighbours on a ring.

    x_i <- mean of x_j over rank i and its neighbours - update(gradient of rank i at its old x_i).
    The mean has equal weights, so the mixing matrix is doubly stochastic, and the mean of all
    ranks moves as that of synchronous SGD does. A rank waits for its neighbours only: ranks that
    are k places apart can be k steps apart.
    """

    place: ClassVar[Place] = "peers"

    def neighbours(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The ranks with which a rank averages, without itself; none if it is alone."""
        return tuple(sorted({(rank - 1) % ranks, (rank + 1) % ranks} - {rank}))

    def policy(self, context: StepContext) -> StepPolicy:
        """Means with the neighbours."""
        return NeighbourMean(self, context)


_MIX: Final = 3


class Peers(ParametersApart):
    """Ranks whose parameters travel to each other, on the CPU."""

    def __init__(self, context: StepContext) -> None:
        """Begins at clock 0.

        Args:
            context: The job.

        Raises:
            MissingCapabilityError: The job has no other rank, or parameters of several types.
        """
        super().__init__(context, context.messages)
        self._me, self._ranks = self._group.rank(), self._group.size()
        self._names = dist.get_process_group_ranks(context.group)
        self._clock = 0
        if self._ranks < 2:
            raise MissingCapabilityError("the job has one rank, and ranks average with others")
        if len({parameter.dtype for parameter in self._parameters}) > 1:
            raise MissingCapabilityError("the model has parameters of several element types")
        mark(mark_name("rule", spec=context.spec))

    def _joined_parameters(self) -> torch.Tensor:
        """A copy of all parameters, on the CPU."""
        with torch.no_grad():
            return torch.cat([p.detach().reshape(-1).to("cpu") for p in self._parameters])

    def _post(self, send: bool, values: torch.Tensor, peer: int, tag: int, name: str) -> Any:
        with carrying(name, self._parameters if values.is_floating_point() else ()):
            if send:
                return dist.isend(values, group=self._group, group_dst=peer, tag=tag)
            return dist.irecv(values, group=self._group, group_src=peer, tag=tag)


class NeighbourMean(Peers):
    """D-PSGD: parameters travel to the neighbours while the next gradient is computed."""

    def __init__(self, rule: Gossip, context: StepContext) -> None:
        """Takes the neighbours from the rule."""
        super().__init__(context)
        self._neighbours = rule.neighbours(self._me, self._ranks)
        self._works: list[Any] = []
        self._buffers: list[torch.Tensor] = []

    def before_update(self, optimizer: Optimizer) -> bool:
        """Takes the mean with the neighbours; the optimizer then applies the local gradient."""
        del optimizer
        if not self._works:
            self._launch()
        start = time.monotonic_ns()
        with region("wait", f"neighbours' parameters of step {self._clock}"):
            self._wait()
        own, *others = self._buffers
        self._set(torch.stack([own, *others]).sum(0) / (1 + len(others)))
        peers = [self._names[peer] for peer in self._neighbours]
        mark(mark_name("mix", worker=self._names[self._me], clock=self._clock, peers=peers), start)
        self._clock += 1
        return True

    def after_update(self, optimizer: Optimizer) -> None:
        """Sends the new parameters."""
        del optimizer
        self._launch()

    def _end_messages(self) -> None:
        self._wait()

    def _launch(self) -> None:
        own = self._joined_parameters()
        self._buffers = [own, *(torch.empty_like(own) for _ in self._neighbours)]
        name = f"parameters of step {self._clock}"
        for peer, buffer in zip(self._neighbours, self._buffers[1:], strict=True):
            self._works.append(self._post(False, buffer, peer, _MIX, name))
            self._works.append(self._post(True, own, peer, _MIX, name))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
