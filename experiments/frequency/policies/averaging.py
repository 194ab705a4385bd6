"""Local SGD and post-local SGD."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ddltrace.experiments.engine.step_policy import StepContext, StepPolicy
from ddltrace.experiments.frequency.local_sgd import LocalSgd
from ddltrace.experiments.frequency.policies.parameter_exchange import ParameterExchange
from ddltrace.experiments.frequency.post_local_sgd import PostLocalSgd

_NAME = "average of parameters"


class AveragingPolicy(StepPolicy):
    """Averages parameters after some updates, or how far they have come since the last time."""

    def __init__(
        self, context: StepContext, frequency: LocalSgd | PostLocalSgd, *, differences: bool
    ) -> None:
        """Makes the exchange.

        Args:
            context: What the policy works on.
            frequency: Says when.
            differences: Whether a codec encodes what is exchanged: then differences travel,
                and the parameters of the last average are kept.
        """
        super().__init__(context)
        self._frequency = frequency
        self._step = 0
        self._exchange = ParameterExchange(context.parameters, context.exchange())
        self._parameters = [parameter for _, parameter in context.parameters]
        self._last: list[torch.Tensor] | None = (
            [p.detach().clone() for p in self._parameters] if differences else None
        )

    def exchanges_gradients(self) -> bool:
        """As the frequency says."""
        return self._frequency.exchanges_gradients(self._step)

    def after_update(self, optimizer: Optimizer) -> None:
        """Averages, if it is time."""
        del optimizer
        step, self._step = self._step, self._step + 1
        if self._frequency.averages_after(step):
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        if self._last is None:
            sent = self._exchange.start([p.detach() for p in self._parameters], _NAME)
            for parameter, average in zip(
                self._parameters, self._exchange.finish(sent, _NAME), strict=True
            ):
                parameter.copy_(average)
            return
        moves = [p.detach() - last for p, last in zip(self._parameters, self._last, strict=True)]
        averages = self._exchange.finish(self._exchange.start(moves, _NAME), _NAME)
        for parameter, last, average in zip(self._parameters, self._last, averages, strict=True):
            last.add_(average)
            parameter.copy_(last)
