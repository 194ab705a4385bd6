"""Creates the exchange of messages of a strategy's codec and architecture."""

from __future__ import annotations

import torch.distributed as dist

from ddltrace.experiments.codecs.codec_exchange import CodecExchange
from ddltrace.experiments.collectives.over_architecture import ArchitectureCollectives
from ddltrace.experiments.engine.architecture_exchange import ArchitectureExchange
from ddltrace.experiments.engine.groups import new_group_like
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.messages.message_exchange import AllReduce, MessageExchange
from ddltrace.experiments.messages.trace_marks import region
from ddltrace.experiments.observation.choices import report_choice
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
