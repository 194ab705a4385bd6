"""Start messages in the order on which all ranks agree, and bring their averages back."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from ddltrace.experiments.engine.step_in_progress import Flight, StepInProgress
from ddltrace.experiments.messages.message_plan import Message, fuse
from ddltrace.experiments.messages.trace_marks import carrying

Launch = Callable[[StepInProgress, Message], Flight]
Land = Callable[[Flight], None]

_POLL_S: Final = 0.5
_HEADER: Final = 16
_AT_ONCE: Final = _HEADER - 2


class Communicator(ABC):
    """Executes what the dispatchers decide."""

    @abstractmethod
    def begin(self, step: StepInProgress) -> None:
        """Called once a step, when its plan is known and before its first message."""

    @abstractmethod
    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Starts messages, in this order, after all that were given before."""

    @abstractmethod
    def wait(self, step: StepInProgress, number: int) -> None:
        """Waits until a message of the plan has landed in the gradients."""

    @abstractmethod
    def close(self) -> None:
        """Ends; nothing may be under way."""


class DirectCommunicator(Communicator):
    """Starts messages on the thread that decides, and lands them on the thread that waits."""

    def __init__(self, launch: Launch, land: Land) -> None:
        self._launch = launch
        self._land = land

    def begin(self, step: StepInProgress) -> None:
        """Nothing to prepare."""

    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Starts messages now."""
        for message in messages:
            _register(self._launch(step, message))

    def wait(self, step: StepInProgress, number: int) -> None:
        """Waits for the message itself."""
        flight = step.flights[number]
        if not flight.landed.is_set():
            self._land(flight)

    def close(self) -> None:
        """Nothing runs."""


class ThreadedCommunicator(Communicator):
    """Starts messages on one thread and lands them on another, both in the agreed order.

    If the ranks follow rank 0, its starting thread tells the others, in a group of its own,
    what it starts, just before it does. Their starting threads wait for that, and then until
    their own gradients are ready.
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
    ) -> None:
        """Starts the threads.

        Args:
            launch: Starts one message.
            land: Waits for one message and puts it into the gradients.
            order_group: Carries rank 0's decisions; None if every rank knows the order.
            has_arrived: Whether all that a message carries is ready on this rank.
            tick: Called once every cycle.
            cycle_s: The cycle in seconds; None for no calls.
        """
        self._launch = launch
        self._land = land
        self._order_group = order_group
        self._leads = order_group is None or dist.get_rank(order_group) == 0
        self._has_arrived = has_arrived
        self._tick = tick
        self._cycle_s = cycle_s if self._leads else None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._starts: queue.SimpleQueue[tuple[StepInProgress, Message | None] | None] = (
            queue.SimpleQueue()
        )
        self._in_flight: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        starting = self._lead if self._leads else self._follow
        self._threads = [
            threading.Thread(target=self._guarded, args=(job,), name=name, daemon=True)
            for job, name in ((starting, "ddltrace-start"), (self._land_all, "ddltrace-land"))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: StepInProgress) -> None:
        """Lets a rank that follows listen for this step's order."""
        self._starts.put((step, None))

    def start(self, step: StepInProgress, messages: Sequence[Message]) -> None:
        """Queues messages for the starting thread."""
        for message in messages:
            self._starts.put((step, message))

    def arrived(self) -> None:
        """To be called when a gradient has become ready: a rank that follows may wait for it."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, step: StepInProgress, number: int) -> None:
        """Waits until the landing thread has put the message into the gradients."""
        with self._changed:
            while number not in step.flights or not step.flights[number].landed.is_set():
                self._raise_error()
                self._changed.wait(_POLL_S)

    def close(self) -> None:
        """Ends both threads."""
        self._starts.put(None)
        for thread in self._threads:
            thread.join(_POLL_S * 10)

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                job()
        except BaseException as error:  # noqa: BLE001 - raised again where the job waits
            self._error = error
            with self._changed:
                self._changed.notify_all()
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
            if item is None:
                return
            step, message = item
            if message is None:
                continue
            self._tell(message)
            self._send(step, message)

    def _tell(self, message: Message) -> None:
        """Tells the ranks that follow what starts next."""
        if self._order_group is None or self._order_group.size() == 1:
            return
        numbers = message.parts or (message.number,)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0] = len(numbers)
        first = numbers[:_AT_ONCE]
        header[1 : 1 + len(first)] = torch.tensor(first)
        self._broadcast(header)
        if len(numbers) > _AT_ONCE:
            self._broadcast(torch.tensor(numbers, dtype=torch.int64))

    def _follow(self) -> None:
        while (item := self._starts.get()) is not None:
            step, _ = item
            assert step.plan is not None
            left = len(step.plan.messages)
            while left:
                message = self._told(step)
                left -= max(1, len(message.parts))
                with self._changed:
                    while not self._has_arrived(step, message):
                        self._changed.wait(_POLL_S)
                self._send(step, message)

    def _told(self, step: StepInProgress) -> Message:
        """The message that rank 0 starts next."""
        assert step.plan is not None
        header = torch.zeros(_HEADER, dtype=torch.int64)
        self._broadcast(header)
        count = int(header[0])
        numbers = header[1 : 1 + count]
        if count > _AT_ONCE:
            numbers = torch.zeros(count, dtype=torch.int64)
            self._broadcast(numbers)
        return fuse([step.plan.messages[number] for number in numbers.tolist()])

    def _broadcast(self, numbers: torch.Tensor) -> None:
        with carrying("order of messages", ()):
            dist.broadcast(numbers, group=self._order_group, group_src=0)

    def _send(self, step: StepInProgress, message: Message) -> None:
        flight = self._launch(step, message)
        with self._changed:
            _register(flight)
        self._in_flight.put(flight)

    def _land_all(self) -> None:
        while (flight := self._in_flight.get()) is not None:
            self._land(flight)
            with self._changed:
                self._changed.notify_all()


def _register(flight: Flight) -> None:
    for number in flight.message.parts or (flight.message.number,):
        flight.step.flights[number] = flight
