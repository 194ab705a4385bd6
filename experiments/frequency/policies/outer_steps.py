"""DiLoCo and streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ddltrace.experiments.engine.step_policy import StepContext, StepPolicy
from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.policies.parameter_exchange import ParameterExchange
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo

_NAME = "outer gradient"


@dataclass
class _Fragment:
    """A part of the model with its own outer optimizer.

    Attributes:
        parameters: Its parameters.
        exchange: Averages its outer gradients.
        outer: The weights after its last outer step.
        momentum: Of the outer optimizer.
        sent: What is under way; None if nothing is.
        due: Number of the inner update after which that is applied.
    """

    parameters: list[torch.nn.Parameter]
    exchange: ParameterExchange
    outer: list[torch.Tensor] = field(default_factory=list)
    momentum: list[torch.Tensor] = field(default_factory=list)
    sent: Any = None
    due: int = 0


class OuterStepPolicy(StepPolicy):
    """Takes outer steps: of the whole model at once, or fragment by fragment.

    What is under way at a checkpoint or at the end stays so: to apply it is up to all ranks
    together, at its step.
    """

    def __init__(
        self, context: StepContext, frequency: DiLoCo | StreamingDiLoCo, momentum: float
    ) -> None:
        """Copies the weights, which the first outer gradient starts from.

        Args:
            context: What the policy works on.
            frequency: Says when which part is exchanged.
            momentum: The outer optimizer's Nesterov momentum.
        """
        super().__init__(context)
        self._frequency = frequency
        self._momentum = momentum
        self._step = 0
        streaming = frequency if isinstance(frequency, StreamingDiLoCo) else None
        sizes = [parameter.numel() for _, parameter in context.parameters]
        parts = streaming.split(sizes) if streaming else [list(range(len(sizes)))]
        self._delay = streaming.delay if streaming else 0
        self._alpha = streaming.alpha if streaming else 1.0
        self._fragments = [
            self._fragment([context.parameters[index] for index in part]) for part in parts
        ]

    def exchanges_gradients(self) -> bool:
        """Never."""
        return False

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Starts what is to be started now, and applies what is due."""
        del optimizer
        step, self._step = self._step, self._step + 1
        for index in self._starting(step):
            fragment = self._fragments[index]
            outer_gradient = [
                outer - parameter.detach()
                for outer, parameter in zip(fragment.outer, fragment.parameters, strict=True)
            ]
            fragment.sent = fragment.exchange.start(outer_gradient, _NAME)
            fragment.due = step + self._delay
        for fragment in self._fragments:
            if fragment.sent is not None and fragment.due == step:
                sent, fragment.sent = fragment.sent, None
                self._apply(fragment, fragment.exchange.finish(sent, _NAME))

    def _starting(self, step: int) -> Sequence[int]:
        if isinstance(self._frequency, DiLoCo):
            return [0] if self._frequency.steps_after(step) else []
        return self._frequency.starts_after(step)

    def _fragment(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> _Fragment:
        exchange = ParameterExchange(parameters, self.context.exchange())
        own = [parameter for _, parameter in parameters]
        return _Fragment(
            own,
            exchange,
            [parameter.detach().clone() for parameter in own],
            [torch.zeros_like(parameter.detach()) for parameter in own] if self._momentum else [],
        )

    def _apply(self, fragment: _Fragment, averages: Sequence[torch.Tensor]) -> None:
        """One step of SGD with Nesterov momentum on the outer weights, mixed into the model."""
        rate = self._frequency.outer_lr
        for index, (parameter, outer) in enumerate(
            zip(fragment.parameters, fragment.outer, strict=True)
        ):
            update = averages[index]
            if self._momentum:
                momentum = fragment.momentum[index]
                momentum.mul_(self._momentum).add_(update)
                update = update.add(momentum, alpha=self._momentum)
            outer.sub_(update, alpha=rate)
            if self._alpha == 1.0:
                parameter.copy_(outer)
            else:
                parameter.lerp_(outer, self._alpha)
