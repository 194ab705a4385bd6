"""The base class of schedules, and the dispatcher that most of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from ddltrace.experiments.messages.message_plan import Gradient, Message, MessagePlan
from ddltrace.experiments.schedules.search import Search


class Dispatcher(Protocol):
    """Decides, within one step on one rank, which messages start now.

    It is a state machine without a clock: the engine reports events of the job, a replay reports
    events of a trace. Messages have to start in the same order on all ranks. If the schedule's
    `agreement` is ``plan``, what a dispatcher returns over a step is
    in the order of the plan, whatever happened on its rank. If it is ``leader``, only rank 0
    has a dispatcher, and the other ranks follow its decisions.
    """

    def gradient_ready(self, index: int) -> Sequence[Message]:
        """The gradient with this index has been computed.

        Returns:
            The messages to start now, in order.
        """
        ...

    def backward_ended(self) -> Sequence[Message]:
        """No further gradient will come in this step; missing gradients count as zero.

        Returns:
            The messages to start now, in order.
        """
        ...

    def completed(self, message: Message) -> Sequence[Message]:
        """A started message has completed.

        Returns:
            The messages to start now, in order.
        """
        ...

    def tick(self) -> Sequence[Message]:
        """One cycle of the schedule has passed, see `Schedule.cycle_ms`.

        Returns:
            The messages to start now, in order.
        """
        ...

    def rest(self) -> Sequence[Message]:
        """Hands over the messages that have not started, after `backward_ended`.

        Nothing but the ends of messages can happen then, so their order is final, and the ranks
        can agree on all of it at once. Asked of schedules with `Schedule.one_in_flight` only.

        Returns:
            The messages, in the order in which each starts after the one before has ended.
        """
        ...


WaitingPoint = Literal["update", "layer", "next_update"]
"""When a step waits for its averages: before the optimizer's step; before the next forward of each
layer, which then updates the layer's parameters; or before the next step's update."""

Agreement = Literal["plan", "leader"]
"""How the ranks agree on an order of messages: the order of the plan, or decisions of rank 0 while
the job runs."""


class Schedule(ABC):
    """A pure description of one way to send the gradients of a step."""

    optimizers: ClassVar[tuple[str, ...] | None] = None
    """Optimizers of ``torch.optim`` with which it works, subclasses included; None for all."""

    @property
    def wait(self) -> WaitingPoint:
        """When the job waits for averages."""
        return "update"

    @property
    def agreement(self) -> Agreement:
        """How the ranks agree on the order of messages."""
        return "plan"

    @property
    def cuts_tensors(self) -> bool:
        """Whether a message may carry a part of a gradient."""
        return False

    @property
    def one_in_flight(self) -> bool:
        """Whether a message starts only after the one before has ended."""
        return False

    @property
    def cycle_ms(self) -> float | None:
        """Time between two calls of `Dispatcher.tick`, in milliseconds; None: never called."""
        return None

    @property
    def search_steps(self) -> int:
        """Steps that are measured for each proposal of the search."""
        return 5

    @property
    def timed_steps(self) -> int:
        """Steps in which to measure when gradients are ready; 0 for a plan without times.

        The engine then calls `with_values` with the start-up time of a message in microseconds
        and the microseconds that a further MiB takes, and plans anew with `Gradient.ready_us`.
        """
        return 0

    @property
    def opening_steps(self) -> int:
        """Exchanges at the start in which it searches or calibrates, and sends the messages for it.

        From the next one on, it is what was found.
        """
        search = self.search()
        if search is not None:
            # A plan is needed first. What was found is broadcast in the step that first uses it.
            return 2 + search.points * (1 + self.search_steps)
        return self.timed_steps + 2 if self.timed_steps else 0

    def search(self) -> Search | None:
        """A search for the schedule's parameters while the job runs; None for no search."""
        return None

    def with_values(self, values: Sequence[float]) -> Schedule:
        """The schedule with parameters that its search has proposed."""
        del values
        return self

    @abstractmethod
    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """Divides and gathers the gradients into messages.

        Args:
            gradients: All gradients, in the order of creation on which the ranks agreed:
                the first to be ready (that of the output layer) stands first.

        Returns:
            The messages in the order in which all ranks will start them.
        """

    @abstractmethod
    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """A fresh dispatcher for one step of a plan that this schedule made."""


def order_of_use(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Gradients in the order in which the next forward pass uses their parameters.

    Args:
        gradients: In the order of creation. Where it is not known when their parameters are
            used, backward is taken to mirror forward.
    """
    if any(gradient.use is None for gradient in gradients):
        return list(reversed(gradients))
    return sorted(gradients, key=lambda gradient: gradient.use or 0)


class Untimed:
    """A dispatcher that ignores ends of messages and the clock."""

    def completed(self, message: Message) -> Sequence[Message]:
        """Starts nothing."""
        del message
        return ()

    def tick(self) -> Sequence[Message]:
        """Starts nothing."""
        return ()

    def rest(self) -> Sequence[Message]:
        """Holds no messages."""
        return ()


class InTurn(Untimed):
    """Starts a message as soon as all its gradients are ready and all messages before it have
    started.

    A message that is ready before its turn is held back, so that the order of collectives is equal
    on ranks whose gradients become ready in different orders.
    """

    def __init__(self, plan: MessagePlan) -> None:
        self._messages = plan.messages
        self._carriers = plan.carriers
        self._missing = [len(message.gradients) for message in plan.messages]
        self._next = 0

    def gradient_ready(self, index: int) -> Sequence[Message]:
        """Returns the ready messages whose turn it is."""
        for number in self._carriers[index]:
            self._missing[number] -= 1
        first = self._next
        while self._next < len(self._messages) and self._missing[self._next] == 0:
            self._next += 1
        return self._messages[first : self._next]

    def backward_ended(self) -> Sequence[Message]:
        """Returns the messages that were held back."""
        first, self._next = self._next, len(self._messages)
        return self._messages[first:]


class AfterBackward(Untimed):
    """Starts nothing before backward has ended, then everything, in the order of the plan."""

    def __init__(self, plan: MessagePlan) -> None:
        self._messages = plan.messages

    def gradient_ready(self, index: int) -> Sequence[Message]:
        """Returns nothing: backward still runs."""
        return ()

    def backward_ended(self) -> Sequence[Message]:
        """Returns every message."""
        return self._messages
