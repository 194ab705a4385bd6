"""The interface for averaging a message over the ranks, and its implementation by all-reduce."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.message_plan import Gradient, Message


class Pending(Protocol):
    """A collective in progress."""

    def wait(self) -> object:
        """Waits for its end."""
        ...


class Handle(Protocol):
    """A message in flight."""

    def wait(self) -> torch.Tensor:
        """The average over the ranks: flat, of the payload's length and element type."""
        ...


class MessageExchange(ABC):
    """Averages the payloads of messages over the ranks of a process group.

    The engine calls `start` in an order on which all ranks agreed, and the handles' `wait` in
    the same order if `rounds` is 2. State of a message, such as a residual, has to be kept by
    the gradient, start and stop of its slices: numbers of messages change when plans change.

    Attributes:
        rounds: 1 if `Handle.wait` launches no collective. 2 if it does: those of `start` then
            use `group` and those of `wait` use `second_group`, so that the order of collectives
            within each group is the same on all ranks, however far `start` runs ahead. An
            exchange for a schedule that waits before the update, with ``plan`` as agreement,
            may launch collectives of `group` in `wait` with 1, too: in each step all calls of
            `start` then come before the first `wait`.
        group: The ranks that take part.
        second_group: The same ranks in a group of its own; None if `rounds` is 1.
    """

    rounds: ClassVar[int] = 1

    def __init__(
        self, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None = None
    ) -> None:
        self.group = group
        self.second_group = second_group

    def prepare(self, gradients: Mapping[int, Gradient]) -> None:
        """Called when the ranks have agreed on a plan, before its first message starts.

        Args:
            gradients: All gradients by their index. May come again; state stays.
        """
        del gradients  # most exchanges need no preparation

    def begin_step(self) -> None:  # noqa: B027 - most exchanges do nothing here
        """Called at the first gradient of a step, before anything else is sent. Collective."""

    def take_momentum(self, momentum: float) -> None:
        """Called before each update if the exchange takes over the optimizer's momentum.

        Args:
            momentum: The factor that the job has chosen.
        """
        del momentum  # most exchanges do not use it

    def close(self) -> None:  # noqa: B027 - most exchanges do nothing here
        """Called at the end, when no message is in flight."""

    @abstractmethod
    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Starts to average a message.

        Args:
            message: Description of the payload.
            payload: This rank's own elements, flat, contiguous and not yet divided by the number of
                ranks. The exchange owns it until `Handle.wait` has returned, may overwrite it, and
                may return it from `wait`.

        Returns:
            The message in flight.
        """


class AllReduce(MessageExchange):
    """One all_reduce a message, as DistributedDataParallel does it: divided, then summed."""

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Launches the all_reduce, in place."""
        del message
        payload.mul_(1.0 / self.group.size())
        work = dist.all_reduce(payload, group=self.group, async_op=True)
        assert work is not None
        return in_place(work, payload)


class Landing:
    """A message in flight, whose average is computed by `wait`."""

    def __init__(self, land: Callable[[], torch.Tensor]) -> None:
        self._land = land

    def wait(self) -> torch.Tensor:
        """The average."""
        with torch.no_grad():
            return self._land()


def in_place(pending: Pending, payload: torch.Tensor) -> Landing:
    """A message in flight whose payload holds the average when a collective has ended."""

    def land() -> torch.Tensor:
        pending.wait()
        return payload

    return Landing(land)
