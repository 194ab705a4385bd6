"""The decisions of a server: which push is applied when, which read is answered when.

A pure state machine: pushes, reads and departures go in, decisions come out. The server's process
carries them out on tensors; a test drives the same object with random schedules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ddltrace.experiments.synchronization.rule import ServerRule


@dataclass(frozen=True)
class Apply:
    """One update: the mean of some pushes.

    Attributes:
        pushes: (worker, clock) of each push, in the order in which they came.
    """

    pushes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Drop:
    """A push that came too late for its round and is not applied."""

    worker: int
    clock: int


@dataclass(frozen=True)
class Answer:
    """A worker may read now.

    Attributes:
        worker: The worker.
        clock: The step that it begins.
        held: For each worker, how many of its updates the parameters hold; by rounds, how many
            rounds, the same for each worker.
        bound: The bound by which the read was admitted; None for no bound.
        active: Workers that still trained when the read was answered.
    """

    worker: int
    clock: int
    held: tuple[int, ...]
    bound: int | None
    active: tuple[int, ...]


Decision = Apply | Drop | Answer


@dataclass
class _Worker:
    clock: int = 0
    active: bool = True
    seconds: deque[float] = field(default_factory=deque)


class ServerState:
    """The pushes and reads that have come to one server.

    A worker's calls come in its own order: read(0), push(0), read(1), push(1), ...; by rounds,
    the clock of a read may be larger than the last push's clock plus 1.
    """

    def __init__(self, rule: ServerRule, workers: int) -> None:
        """Begins with nothing applied.

        Args:
            rule: The synchronization rule.
            workers: Number of workers; they are numbered from 0.
        """
        self._rule = rule
        self._workers = [_Worker(seconds=deque(maxlen=rule.history())) for _ in range(workers)]
        self._reads: dict[int, int] = {}
        self._round = 0
        self._pushed: dict[int, list[int]] = {}

    @property
    def active(self) -> tuple[int, ...]:
        """Workers that still train."""
        return tuple(number for number, worker in enumerate(self._workers) if worker.active)

    @property
    def rounds(self) -> int:
        """Rounds that have been applied."""
        return self._round

    def clock(self, worker: int) -> int:
        """How many updates a worker has pushed."""
        return self._workers[worker].clock

    def push(self, worker: int, clock: int, seconds: float) -> list[Decision]:
        """A worker's update has come.

        Args:
            clock: The step that it belongs to.
            seconds: Time that the worker computed for the step.
        """
        own = self._workers[worker]
        own.clock = clock + 1
        own.seconds.append(seconds)
        if not self._rule.by_rounds:
            return [Apply(((worker, clock),)), *self._answers()]
        if clock < self._round:
            return [Drop(worker, clock), *self._answers()]
        self._pushed.setdefault(clock, []).append(worker)
        return [*self._complete_rounds(), *self._answers()]

    def read(self, worker: int, clock: int) -> list[Decision]:
        """A worker requests to begin a step."""
        self._reads[worker] = clock
        return self._answers()

    def leave(self, worker: int) -> list[Decision]:
        """A worker has finished or died: from now on no worker waits for it."""
        self._workers[worker].active = False
        self._reads.pop(worker, None)
        return [*self._complete_rounds(), *self._answers()]

    def _complete_rounds(self) -> Iterable[Decision]:
        decisions: list[Decision] = []
        while (pushed := self._pushed.get(self._round)) and self._is_complete(pushed):
            del self._pushed[self._round]
            decisions.append(Apply(tuple((worker, self._round) for worker in pushed)))
            self._round += 1
        return decisions

    def _is_complete(self, pushed: list[int]) -> bool:
        active = self.active
        waiting = sum(worker in active for worker in pushed)
        return not active or self._rule.round_is_complete(waiting, len(active))

    def _answers(self) -> list[Decision]:
        if not self._reads:
            return []
        active = self.active
        bound = self._rule.bound_for({n: tuple(self._workers[n].seconds) for n in active})
        slowest = min((self._workers[number].clock for number in active), default=0)
        answers: list[Decision] = []
        for worker, clock in sorted(self._reads.items()):
            begins = clock
            if self._rule.by_rounds:
                admitted = self._round >= clock
                begins = max(clock, self._round)
                held = (self._round,) * len(self._workers)
            else:
                admitted = bound is None or clock - slowest <= bound
                held = tuple(each.clock for each in self._workers)
            if admitted:
                del self._reads[worker]
                answers.append(Answer(worker, begins, held, bound, active))
        return answers
