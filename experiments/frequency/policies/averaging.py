"""Local SGD and post-local SGD."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ddltrace.experiments.frequency.local_sgd import LocalSgd
from ddltrace.experiments.frequency.policies.parameter_exchange import ParameterExchange
from ddltrace.experiments.frequency.policies.step_policy import StepContext, StepPolicy
from ddltrace.experiments.frequency.post_local_sgd import PostLocalSgd

_NAME = "average of parameters"


class AveragingPolicy(StepPolicy):
    """Averages parameters after some updates, or how far they have come since the last time."""

    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(
        self, context: StepContext, frequency: LocalSgd | PostLocalSgd, *, differences: bool
    ) -> None:
        """Creates the exchange.

        Args:
            context: What the policy works on.
            frequency: Determines the steps.
            differences: Whether a codec encodes the exchange: then differences are sent, and the
                parameters of the last average are kept.
        """
        super().__init__(context)
        self._frequency = frequency
        self._step = 0
        self._exchange = ParameterExchange(context.parameters, context.exchange())
        self._parameters = [parameter for _, parameter in context.parameters]
        self._differences = differences
        self._last: list[torch.Tensor] | None = None

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged, by the frequency technique."""
        return self._frequency.exchanges_gradients(self._step)

    def before_update(self, optimizer: Optimizer) -> bool:
        """Copies the initial weights, from which differences are computed.

        Not earlier: a job loads a checkpoint of its model after it has wrapped it.
        """
        del optimizer
        if self._differences and self._last is None:
            self._last = [parameter.detach().clone() for parameter in self._parameters]
        return True

    def state(self) -> dict[str, Any]:
        """The number of the step, and the parameters of the last average."""
        return {"step": self._step, "last": self._last}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores both."""
        last = state["last"]
        if self._differences and last is not None:
            if [t.shape for t in last] != [p.shape for p in self._parameters]:
                raise ValueError("its parameters have other shapes")
            self._last = [
                tensor.to(parameter.device, parameter.dtype, copy=True)
                for tensor, parameter in zip(last, self._parameters, strict=True)
            ]
        self._step = int(state["step"])

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
