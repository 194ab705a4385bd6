"""Start messages in an order that is equal on all ranks, and store their averages in the
gradients."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from ddltrace.experiments.engine.step_in_progress import Flight, StepInProgress
from ddltrace.experiments.messages.message_plan import Message, MessagePlan, fuse
from ddltrace.experiments.messages.trace_marks import carrying

Launch = Callable[[StepInProgress, Message], Flight]
Land = Callable[[Flight], None]

_POLL_S: Final = 0.5
_HEADER: Final = 16
_AT_ONCE: Final = _HEADER - 2


class Communicator(ABC):
    """Executes the decisions of the dispatchers."""

    @abstractmethod
    def begin(self, step: StepInProgress) -> None:
        """Called once a step, when its plan is known and before its first message."""

    @abstractmethod
    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Starts messages, in this order, after all messages of earlier calls."""

    @abstractmethod
    def wait(self, step: StepInProgress, numbers: Iterable[int]) -> None:
        """Waits until averages of the plan's messages are in the gradients."""

    @abstractmethod
    def close(self) -> None:
        """Releases resources; no message may be in progress."""


class DirectCommunicator(Communicator):
    """Starts messages on the deciding thread, and stores averages on the waiting thread."""

    def __init__(self, launch: Launch, land: Land) -> None:
        self._launch = launch
        self._land = land

    def begin(self, step: StepInProgress) -> None:
        """Nothing to prepare."""

    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Starts messages now."""
        for message in messages:
            flight = self._launch(step, message)
            for number in _numbers(message):
                step.flights[number] = flight

    def wait(self, step: StepInProgress, numbers: Iterable[int]) -> None:
        """Waits for the messages themselves."""
        for number in sorted(numbers):
            flight = step.flights[number]
            if not flight.landed.is_set():
                self._land(flight)

    def close(self) -> None:
        """Nothing runs."""


class ThreadedCommunicator(Communicator):
    """Starts messages on one thread and stores averages on another, both in the agreed order.

    If the ranks follow rank 0, its starting thread announces messages to the others, in a separate
    group, just before it starts them. Their starting threads wait for that, and then until their
    own gradients are ready.

    With one message in flight, the starting thread lands each message itself: a second thread
    would cost two switches of threads for each message.
    """

    def __init__(
        self,
        launch: Launch,
        land: Land,
        *,
        order_group: dist.ProcessGroup | None,
        has_arrived: Callable[[StepInProgress, Message], bool],
        tick: Callable[[], None],
        cycle_s: float | None,
        one_in_flight: bool,
    ) -> None:
        """Starts the threads.

        Args:
            launch: Starts one message.
            land: Waits for one message and puts it into the gradients.
            order_group: Carries rank 0's decisions; None if every rank knows the order.
            has_arrived: Whether all gradients of a message are ready on this rank.
            tick: Called once every cycle.
            cycle_s: The cycle in seconds; None for no calls.
            one_in_flight: Whether a message starts only after the one before has landed.
        """
        self._launch = launch
        self._land = land
        self._order_group = order_group
        self._leads = order_group is None or dist.get_rank(order_group) == 0
        self._has_arrived = has_arrived
        self._tick = tick
        self._cycle_s = cycle_s if self._leads else None
        self._one_in_flight = one_in_flight
        self._error: BaseException | None = None
        self._arrivals = threading.Condition()
        self._landings = threading.Condition()
        self._awaited: list[tuple[StepInProgress, set[int]]] = []
        self._starts: queue.SimpleQueue[tuple[StepInProgress, Message | None] | None] = (
            queue.SimpleQueue()
        )
        self._in_flight: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        jobs = [(self._lead if self._leads else self._follow, "ddltrace-start")]
        if not one_in_flight:
            jobs.append((self._land_all, "ddltrace-land"))
        self._threads = [
            threading.Thread(target=self._guarded, args=(job,), name=name, daemon=True)
            for job, name in jobs
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: StepInProgress) -> None:
        """Lets a rank that follows rank 0 receive this step's order."""
        self._starts.put((step, None))

    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Queues messages for the starting thread."""
        for message in messages:
            self._starts.put((step, message))

    def arrived(self) -> None:
        """To be called when a gradient has become ready: a rank that follows may wait for it."""
        with self._arrivals:
            self._arrivals.notify_all()

    def wait(self, step: StepInProgress, numbers: Iterable[int]) -> None:
        """Waits until the messages have been put into the gradients."""
        with self._landings:
            awaited = {number for number in numbers if not _has_landed(step, number)}
            self._awaited.append((step, awaited))
            while awaited:
                self._raise_error()
                self._landings.wait(_POLL_S)
            self._awaited = [entry for entry in self._awaited if entry[1]]

    def close(self) -> None:
        """Ends the threads."""
        self._starts.put(None)
        for thread in self._threads:
            thread.join(_POLL_S * 10)

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                job()
        except BaseException as error:  # noqa: BLE001 - raised again where the job waits
            self._error = error
            with self._landings:
                self._landings.notify_all()
        finally:
            self._in_flight.put(None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the exchange of gradients failed: {self._error}") from self._error

    def _lead(self) -> None:
        while True:
            try:
                item = self._starts.get(timeout=self._cycle_s)
            except queue.Empty:
                self._tick()
                continue
            # All decisions that have been made by now go to the other ranks together.
            items = [item]
            while not self._starts.empty():
                items.append(self._starts.get())
            due = [(step, message) for step, message in filter(None, items) if message is not None]
            self._tell([message for _, message in due])
            for step, message in due:
                self._send(step, message)
            if None in items:
                return

    def _tell(self, messages: Sequence[Message]) -> None:
        """Sends the next messages, in this order, to the ranks that follow."""
        if self._order_group is None or self._order_group.size() == 1 or not messages:
            return
        announced = [number for message in messages for number in _announcement(message)]
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0] = len(announced)
        first = announced[:_AT_ONCE]
        header[1 : 1 + len(first)] = torch.tensor(first)
        self._broadcast(header)
        if len(announced) > _AT_ONCE:
            self._broadcast(torch.tensor(announced, dtype=torch.int64))

    def _follow(self) -> None:
        while (item := self._starts.get()) is not None:
            step, _ = item
            assert step.plan is not None
            left = len(step.plan.messages)
            while left:
                for message in self._told(step):
                    left -= max(1, len(message.parts))
                    with self._arrivals:
                        while not self._has_arrived(step, message):
                            self._arrivals.wait(_POLL_S)
                    self._send(step, message)

    def _told(self, step: StepInProgress) -> list[Message]:
        """The messages that rank 0 starts next."""
        assert step.plan is not None
        header = torch.zeros(_HEADER, dtype=torch.int64)
        self._broadcast(header)
        count = int(header[0])
        announced = header[1 : 1 + count]
        if count > _AT_ONCE:
            announced = torch.zeros(count, dtype=torch.int64)
            self._broadcast(announced)
        return _messages_of(announced.tolist(), step.plan)

    def _broadcast(self, numbers: torch.Tensor) -> None:
        with carrying("order of messages", ()):
            dist.broadcast(numbers, group=self._order_group, group_src=0)

    def _send(self, step: StepInProgress, message: Message) -> None:
        flight = self._launch(step, message)
        for number in _numbers(message):
            step.flights[number] = flight
        if self._one_in_flight:
            self._bring_back(flight)
        else:
            self._in_flight.put(flight)

    def _land_all(self) -> None:
        while (flight := self._in_flight.get()) is not None:
            self._bring_back(flight)

    def _bring_back(self, flight: Flight) -> None:
        """Stores the average of a message, and wakes threads for which it was the last one."""
        self._land(flight)
        with self._landings:
            for step, awaited in self._awaited:
                if step is flight.step:
                    awaited.difference_update(_numbers(flight.message))
            if not all(awaited for _, awaited in self._awaited):
                self._landings.notify_all()


def _numbers(message: Message) -> tuple[int, ...]:
    """The numbers of the plan's messages that a message consists of."""
    return message.parts or (message.number,)


def _has_landed(step: StepInProgress, number: int) -> bool:
    flight = step.flights.get(number)
    return flight is not None and flight.landed.is_set()


def _announcement(message: Message) -> list[int]:
    """Encodes a message of rank 0: how many of the plan's messages it fuses, and which."""
    numbers = _numbers(message)
    return [len(numbers), *numbers]


def _messages_of(announced: list[int], plan: MessagePlan) -> list[Message]:
    """Undoes `_announcement`."""
    messages = []
    at = 0
    while at < len(announced):
        numbers = announced[at + 1 : at + 1 + announced[at]]
        messages.append(fuse([plan.messages[number] for number in numbers]))
        at += 1 + len(numbers)
    return messages
