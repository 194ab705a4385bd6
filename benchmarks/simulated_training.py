"""Trains a model under a strategy on simulated ranks: the strategy's own code, one process.

Schedules change when gradients travel and not their average, so gradients go as one message here,
in the order in which the first backward pass produced them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from simulated_ranks import SimulatedRanks
from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.codecs.codec_exchange import CodecExchange
from ddltrace.experiments.engine.payloads import Payloads
from ddltrace.experiments.engine.pending_averages import PendingAverages
from ddltrace.experiments.engine.take_over import create_step_policy
from ddltrace.experiments.engine.update_control import UpdateControl
from ddltrace.experiments.frequency.frequency import StepContext
from ddltrace.experiments.messages.message_exchange import AllReduce, MessageExchange
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.strategy.strategy import Strategy


@dataclass
class Replica:
    """One rank's share of a training.

    Attributes:
        model: The rank's own copy; the same weights on all ranks.
        optimizer: Optimizer of the model's parameters.
        loss: The loss of step number n on this rank.
        after_step: Called after every update.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], torch.Tensor]
    after_step: Callable[[], object] = lambda: None


def train(spec: str, ranks: int, steps: int, replica: Callable[[int], Replica]) -> list[Replica]:
    """Trains under a strategy.

    Args:
        spec: The strategy.
        ranks: Number of ranks.
        steps: Number of the job's optimizer steps.
        replica: Makes the share of a rank.

    Returns:
        The shares of all ranks after the training.
    """
    strategy = parse(spec)
    simulated = SimulatedRanks(ranks)

    def one(rank: int) -> Replica:
        own = replica(rank)
        _RankTraining(strategy, simulated, rank, own).run(steps)
        return own

    return simulated.run(one)


class _RankTraining:
    def __init__(
        self, strategy: Strategy, ranks: SimulatedRanks, rank: int, replica: Replica
    ) -> None:
        self._replica = replica
        self._strategy, self._ranks, self._rank = strategy, ranks, rank
        self._made = 0
        named = [(n, p) for n, p in replica.model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._arrived: list[int] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda _, index=index: self._arrived.append(index)
            )
            for index, (_, parameter) in enumerate(named)
        ]
        self._policy = create_step_policy(
            strategy,
            StepContext(
                strategy.spec,
                named,
                ranks.group(rank, "model"),
                ranks.group(rank, "messages"),
                self._new_exchange,
                encodes=strategy.encodes,
                keeps_residuals=strategy.feedback is not None,
            ),
        )
        exchanges = getattr(strategy.frequency, "exchanges", "gradients")
        self._exchange = self._new_exchange() if exchanges == "gradients" else self._plain()
        self._plan: MessagePlan | None = None
        self._payloads = Payloads(copies=False)
        self._stand_in: Any = SimpleNamespace(
            waits_by_layer=False,
            pending=PendingAverages([], strategy.spec),
            take_momentum=self._exchange.take_momentum,
            backward_passes=0,
            passes_with_gradients=0,
        )
        self._control = UpdateControl(
            strategy.spec,
            self._parameters,
            self._stand_in,
            self._policy,
            strategy.optimizer_rule,
            takes_momentum=getattr(strategy.codec, "takes_momentum", False),
        )

    def run(self, steps: int) -> None:
        replica = self._replica
        for step in range(steps):
            replica.optimizer.zero_grad()
            self._stand_in.backward_passes += 1
            self._stand_in.passes_with_gradients += 1
            exchanges = self._policy.exchanges_gradients()
            replica.loss(step).backward()
            if self._plan is None:
                self._adopt_plan()
            for index in self._arrived:
                self._policy.gradient_ready(self._parameters[index], exchanged=exchanges)
            if exchanges:
                self._average()
            replica.optimizer.step()
            replica.after_step()
        self._control.settle()
        self._control.close()

    def _adopt_plan(self) -> None:
        for hook in self._hooks:
            hook.remove()
        gradients = [_gradient(index, self._parameters[index]) for index in self._arrived]
        self._plan = MessagePlan(gradients, [[whole(gradient) for gradient in gradients]])
        self._exchange.prepare(self._plan.gradients)

    def _average(self) -> None:
        gradients = {index: self._parameters[index].grad for index in self._arrived}
        self._exchange.begin_step()
        for message in self._plan.messages:
            payload = self._payloads.gather(message, gradients)
            average = self._exchange.start(message, payload).wait()
            self._payloads.scatter(message, average, gradients)

    def _new_exchange(self) -> MessageExchange:
        if self._strategy.codec is None and self._strategy.feedback is None:
            return self._plain()
        self._made += 1
        first, second = (
            self._ranks.group(self._rank, f"{purpose} {self._made}") for purpose in "ab"
        )
        return CodecExchange(self._strategy.codec, self._strategy.feedback, first, second)

    def _plain(self) -> MessageExchange:
        self._made += 1
        return AllReduce(self._ranks.group(self._rank, f"plain {self._made}"))


def _gradient(index: int, parameter: nn.Parameter) -> Gradient:
    return Gradient(
        index,
        f"p{index}",
        parameter.numel(),
        parameter.element_size(),
        shape=tuple(parameter.shape),
    )


def parameters_of(replicas: Sequence[Replica]) -> list[torch.Tensor]:
    """All parameters of each rank, flat."""
    return [
        torch.cat([p.detach().reshape(-1) for p in replica.model.parameters()])
        for replica in replicas
    ]
