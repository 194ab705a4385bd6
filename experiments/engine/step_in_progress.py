"""The state of one exchange of all gradients, from the first gradient to the last average."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddltrace.experiments.messages.message_exchange import Handle
from ddltrace.experiments.messages.message_plan import Message, MessagePlan
from ddltrace.experiments.schedules.base import Dispatcher


class StepInProgress:
    """Gradients and messages of one backward pass so far.

    Attributes:
        plan: The messages; None in the first step, until the ranks have agreed.
        dispatcher: Decides what starts; None until then, and on ranks that follow rank 0.
        counts: How many parts of each gradient backward has computed.
        arrived: Indices of ready gradients in their order (a dict used as an ordered set).
        gradients: Gradients to average, by index; zeros if this rank has no gradient.
        sparse_gradients: Sparse gradients that are ready; they travel apart from the plan, when
            backward has ended.
        sparse: Sparse gradients in flight.
        unsettled: Gradients that were sent and whose averages are not yet stored.
        flights: Messages in flight or completed, by the numbers of the plan's messages.
        usage: Which parameters some rank used.
        ended: Whether backward has ended on this rank.
    """

    def __init__(self, plan: MessagePlan | None, dispatcher: Dispatcher | None) -> None:
        self.plan = plan
        self.dispatcher = dispatcher
        self.counts: dict[int, int] = {}
        self.arrived: dict[int, None] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.sparse_gradients: dict[int, torch.Tensor] = {}
        self.sparse: dict[int, SparseFlight] = {}
        self.unsettled: set[int] = set()
        self.flights: dict[int, Flight] = {}
        self.usage: Usage | None = None
        self.ended = False


@dataclass
class Flight:
    """A message that has started.

    Attributes:
        message: The message.
        step: The step that it belongs to.
        handle: Gives its average.
        landed: Set when the average is in the gradients.
    """

    message: Message
    step: StepInProgress
    handle: Handle
    landed: threading.Event = field(default_factory=threading.Event)


class SparseFlight:
    """A sparse gradient in flight: its indices and values are gathered from all ranks."""

    def __init__(self, gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._averaged = gradient.coalesce() / group.size()
        self._work = dist.all_reduce(self._averaged, group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """The average, sparse and coalesced."""
        assert self._work is not None
        self._work.wait()
        # Gloo leaves the sum of sparse tensors in its result, not in place.
        averaged: torch.Tensor = self._work.get_future().value()[0]
        return averaged.coalesce()


class Usage:
    """Which parameters got a gradient on any rank: one all_reduce, awaited when asked."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], arrived: list[int], group: dist.ProcessGroup
    ) -> None:
        counts = torch.zeros(len(parameters), dtype=torch.int32)
        counts[arrived] = 1
        self._counts = counts.to(parameters[0].device)
        self._work = dist.all_reduce(self._counts, group=group, async_op=True)
        self._found: list[int] | None = None

    def anywhere(self, index: int) -> bool:
        """Whether some rank used the parameter in this step."""
        if self._found is None:
            assert self._work is not None
            self._work.wait()
            self._found = self._counts.tolist()
        return self._found[index] > 0
