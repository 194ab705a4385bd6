"""The exchange of messages of a strategy's codec and architecture."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.transfers import Transfer
from ddltrace.experiments.codecs.codec_exchange import CodecExchange
from ddltrace.experiments.collectives.over_architecture import ArchitectureCollectives
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.messages.message_exchange import (
    AllReduce,
    Handle,
    MessageExchange,
    in_place,
)
from ddltrace.experiments.messages.message_plan import Gradient, Message
from ddltrace.experiments.messages.trace_marks import carrying_part, region
from ddltrace.experiments.observation.notes import report_choice
from ddltrace.experiments.strategy.strategy import Strategy


def create_message_exchange(strategy: Strategy, group: dist.ProcessGroup) -> MessageExchange:
    """Creates the exchange of a strategy; with neither codec nor architecture, `AllReduce`.

    Collective: all ranks of the group have to call it at the same point.

    Args:
        strategy: Its codec, modifier and architecture decide.
        group: The ranks.

    Raises:
        StrategyRefusedError: The architecture cannot be built from these ranks.
    """
    if strategy.architecture is None:
        if not strategy.encodes:
            return AllReduce(group)
        second_group = new_group_like(group, "second exchange")
        return CodecExchange(strategy.codec, strategy.feedback, group, second_group)
    try:
        first = ArchitectureCollectives(strategy.architecture, group)
    except ValueError as error:
        refuse(strategy.spec, str(error))
    if first.links is not None:
        choice = f"auto: {first.links.describe()}"
        with region("marker", choice):
            report_choice("auto", choice, first.links.to_json())
    if not strategy.encodes:
        return ArchitectureExchange(first)
    second_group = new_group_like(group, "second exchange")
    # The rules let no codec with two passes use servers of their own: one set of them is enough.
    second = (
        first if first.has_servers else ArchitectureCollectives(strategy.architecture, second_group)
    )
    return CodecExchange(
        strategy.codec, strategy.feedback, group, second_group, collectives=(first, second)
    )


class ArchitectureExchange(MessageExchange):
    """One all-reduce a message over an architecture: divided, then summed.

    Later rounds start while a message is waited for, so the engine waits on a thread of its own.
    """

    rounds: ClassVar[int] = 2

    def __init__(self, collectives: ArchitectureCollectives) -> None:
        """Stores the collectives.

        Args:
            collectives: Sum the messages. Each message has tags of its own, so one group is
                enough for both passes.
        """
        super().__init__(collectives.group, collectives.group)
        self._collectives = collectives
        self._names: dict[int, str] = {}

    def prepare(self, gradients: Mapping[int, Gradient]) -> None:
        """Stores the gradients' names, and places keys by their sizes."""
        self._names = {index: gradient.name for index, gradient in gradients.items()}
        self._collectives.prepare({i: gradient.elements for i, gradient in gradients.items()})
        placement = self._collectives.placement
        if placement is not None:
            report_choice("placement", placement.describe(), placement.to_json())

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Launches the first round, in place."""
        payload.mul_(1.0 / self.group.size())
        slices = tuple((part.gradient, part.start, part.stop) for part in message.slices)
        naming = partial(self._carrying, message)
        return in_place(self._collectives.all_reduce(payload, slices, naming), payload)

    def close(self) -> None:
        """Closes the collectives."""
        self._collectives.close()

    def _carrying(self, message: Message, transfer: Transfer) -> AbstractContextManager[None]:
        """Names a message after the parts of gradients that it carries."""
        offset = 0
        carried: dict[int, str] = {}
        for part in message.slices:
            first = max(transfer.start - offset, 0)
            end = min(transfer.stop - offset, part.elements)
            if first < end:
                range_ = f"[{part.start + first}:{part.start + end}]"
                name = self._names.get(part.gradient, str(part.gradient))
                carried.setdefault(part.gradient, name + range_)
            offset += part.elements
        order = list(dict.fromkeys(part.gradient for part in message.slices))
        name = next(iter(carried.values()))
        if len(carried) > 1:
            name += f" +{len(carried) - 1}"
        return carrying_part(name, [order.index(gradient) for gradient in carried])
