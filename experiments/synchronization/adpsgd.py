"""AD-PSGD: Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
ICML 2018."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from ddltrace.experiments.frequency.frequency import StepContext, StepPolicy
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.messages.trace_marks import mark, region
from ddltrace.experiments.synchronization.gossip import Peers
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "synchronization",
    "adpsgd",
    "AD-PSGD: ranks average parameters in pairs at any time, without waiting for each other",
    "Lian et al., ICML 2018",
)
@dataclass(frozen=True)
class AdPsgd(Synchronization):
    """Active ranks average with one passive rank at a time, and no rank waits for a computation.

    Ranks of even number are active: in each step one sends its parameters to a passive rank of
    its choice, and both continue with the mean. Passive ranks answer at any time, also while they
    compute. No two ranks of a kind average, so that they cannot wait for each other in a circle.
    The gradient of a step is taken where its forward pass read the parameters, and applied to what
    they are by then.
    """

    place: ClassVar[Place] = "peers"

    def is_active(self, rank: int) -> bool:
        """Whether a rank chooses its partners."""
        return rank % 2 == 0

    def partners(self, rank: int, ranks: int) -> tuple[int, ...]:
        """The ranks with which a rank may average."""
        return tuple(range(1 - rank % 2, ranks, 2))

    def partner(self, rank: int, ranks: int, clock: int) -> int:
        """The passive rank that an active one chooses in a step.

        Args:
            rank: An active rank.
            ranks: Number of ranks, at least 2.
            clock: Number of the step.
        """
        return random.Random(rank * 1_000_003 + clock).choice(self.partners(rank, ranks))

    def policy(self, context: StepContext) -> StepPolicy:
        """Means of pairs."""
        return PairMean(self, context)


_REQUEST: Final = 1
_ANSWER: Final = 2
_END: Final = -1


class PairMean(Peers):
    """AD-PSGD: an active rank averages with one passive rank in each step.

    A passive rank answers on threads of its own. It keeps its parameters apart from those that it
    computes with, and takes them over before each of its updates.
    """

    def __init__(self, rule: AdPsgd, context: StepContext) -> None:
        """Starts to answer, on a passive rank; the rule pairs the ranks."""
        super().__init__(context)
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
