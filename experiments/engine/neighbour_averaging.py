"""D-PSGD and AD-PSGD in a job: ranks average their parameters with each other."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.frequency.frequency import ParametersApart, StepContext
from ddltrace.experiments.messages.trace_marks import carrying, mark, region
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.marks import mark_name

_REQUEST: Final = 1
_ANSWER: Final = 2
_MIX: Final = 3
_END: Final = -1


class _Peers(ParametersApart):
    """What both have in common."""

    def __init__(self, spec: str, context: StepContext, group: dist.ProcessGroup) -> None:
        """Takes the group.

        Args:
            spec: The strategy.
            context: The job.
            group: Process group that carries the messages.
        """
        super().__init__(context, group)
        self._me, self._ranks = group.rank(), group.size()
        self._names = dist.get_process_group_ranks(context.group)
        self._clock = 0
        if self._ranks < 2:
            refuse(spec, "the job has one rank, and ranks average with others")
        if len({parameter.dtype for parameter in self._parameters}) > 1:
            refuse(spec, "the model has parameters of several element types")
        mark(mark_name("rule", spec=spec))

    def _joined_parameters(self) -> torch.Tensor:
        """A copy of all parameters, on the CPU."""
        with torch.no_grad():
            return torch.cat([p.detach().reshape(-1).to("cpu") for p in self._parameters])

    def _post(self, send: bool, values: torch.Tensor, peer: int, tag: int, name: str) -> Any:
        with carrying(name, self._parameters if values.is_floating_point() else ()):
            if send:
                return dist.isend(values, group=self._group, group_dst=peer, tag=tag)
            return dist.irecv(values, group=self._group, group_src=peer, tag=tag)


class NeighbourMean(_Peers):
    """D-PSGD: parameters travel to the neighbours while the next gradient is computed."""

    def __init__(
        self, spec: str, rule: Gossip, context: StepContext, group: dist.ProcessGroup
    ) -> None:
        """Takes the rule.

        Args:
            spec: The strategy.
            rule: The rule, which gives the neighbours.
            context: The job.
            group: Process group that carries the messages.
        """
        super().__init__(spec, context, group)
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


class PairMean(_Peers):
    """AD-PSGD: an active rank averages with one passive rank in each step.

    A passive rank answers on threads of its own. It keeps its parameters apart from those that it
    computes with, and takes them over before each of its updates.
    """

    def __init__(
        self, spec: str, rule: AdPsgd, context: StepContext, group: dist.ProcessGroup
    ) -> None:
        """Starts to answer, on a passive rank.

        Args:
            spec: The strategy.
            rule: The rule, which pairs the ranks.
            context: The job.
            group: Process group that carries the messages.
        """
        super().__init__(spec, context, group)
        self._rule = rule
        self._is_active = rule.is_active(self._me)
        self._shared: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._threads: list[threading.Thread] = []
        if not self._is_active:
            for peer in rule.partners(self._me, self._ranks):
                thread = threading.Thread(
                    target=self._answer, args=(peer,), name=f"ddltrace-peer-{peer}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Averages with a partner, or takes over what partners have made of the parameters."""
        del optimizer
        if self._is_active:
            self._average()
            return True
        if self._shared is None:
            self._shared = self._joined_parameters()
            self._begun.set()
        self._lock.acquire()
        self._set(self._shared)
        return True

    def after_update(self, optimizer: Optimizer) -> None:
        """Counts the step; a passive rank lets its partners see it."""
        del optimizer
        self._clock += 1
        if not self._is_active:
            self._shared = self._joined_parameters()
            self._lock.release()

    def _end_messages(self) -> None:
        if self._is_active:
            message = torch.tensor([_END])
            for peer in self._rule.partners(self._me, self._ranks):
                self._post(True, message, peer, _REQUEST, "end").wait()
            return
        if self._shared is None:
            self._shared = self._joined_parameters()
            self._begun.set()
        for thread in self._threads:
            thread.join()
        self._set(self._shared)

    def _average(self) -> None:
        peer = self._rule.partner(self._me, self._ranks, self._clock)
        start = time.monotonic_ns()
        own = self._joined_parameters()
        mean = torch.empty_like(own)
        clock = torch.tensor([self._clock])
        theirs = torch.zeros(1, dtype=torch.int64)
        name = f"parameters of step {self._clock}"
        with region("wait", f"mean with rank {self._names[peer]}"):
            works = [
                self._post(True, clock, peer, _REQUEST, name),
                self._post(True, own, peer, _REQUEST, name),
                self._post(False, theirs, peer, _ANSWER, name),
                self._post(False, mean, peer, _ANSWER, name),
            ]
            for work in works:
                work.wait()
        self._set(mean)
        self._mark(self._clock, peer, int(theirs), start)

    def _answer(self, peer: int) -> None:
        """Averages with one active rank, whenever it asks."""
        clock = torch.zeros(1, dtype=torch.int64)
        while True:
            self._post(False, clock, peer, _REQUEST, "request").wait()
            if int(clock) == _END:
                return
            self._begun.wait()
            theirs = torch.empty_like(self._held())
            name = f"parameters of step {int(clock)}"
            self._post(False, theirs, peer, _REQUEST, name).wait()
            with self._lock:
                own_clock = self._clock
                mean = (self._held() + theirs) / 2
                self._shared = mean.clone()
                self._mark(own_clock, peer, int(clock), None)
            for work in [
                self._post(True, torch.tensor([own_clock]), peer, _ANSWER, name),
                self._post(True, mean, peer, _ANSWER, name),
            ]:
                work.wait()

    def _held(self) -> torch.Tensor:
        assert self._shared is not None
        return self._shared

    def _mark(self, clock: int, peer: int, peer_clock: int, start: int | None) -> None:
        name = mark_name(
            "average",
            worker=self._names[self._me],
            clock=clock,
            peer=self._names[peer],
            peer_clock=peer_clock,
        )
        mark(name, start)
