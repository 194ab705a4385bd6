"""DiLoCo and streaming DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from ddltrace.experiments.frequency.diloco import DiLoCo
from ddltrace.experiments.frequency.policies.parameter_exchange import ParameterExchange
from ddltrace.experiments.frequency.policies.step_policy import StepContext, StepPolicy
from ddltrace.experiments.frequency.streaming_diloco import StreamingDiLoCo

_NAME = "outer gradient"


@dataclass
class _Fragment:
    """A part of the model with its own outer optimizer.

    Attributes:
        parameters: Its parameters.
        exchange: Averages its outer gradients.
        outer: The weights after its last outer step.
        momentum: Momentum buffer of the outer optimizer.
        gradient: This rank's own outer gradient, while it is in flight or must be sent again.
        sent: The messages in flight; None if there are none.
        due: Number of the inner update after which the average is applied.
    """

    parameters: list[torch.nn.Parameter]
    exchange: ParameterExchange
    outer: list[torch.Tensor] = field(default_factory=list)
    momentum: list[torch.Tensor] = field(default_factory=list)
    gradient: list[torch.Tensor] | None = None
    sent: Any = None
    due: int = 0


class OuterStepPolicy(StepPolicy):
    """Takes outer steps: of the whole model at once, or fragment by fragment.

    A checkpoint of the job's optimizer contains the outer weights, their momentum, the number of
    the step, and the outer gradients in flight, which are sent again after loading, because all
    ranks must apply their averages at the same step. Residuals of `feedback` restart at zero. At
    the end, pending messages are awaited and dropped.
    """

    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(
        self, context: StepContext, frequency: DiLoCo | StreamingDiLoCo, momentum: float
    ) -> None:
        """Plans the fragments.

        Args:
            context: What the policy works on.
            frequency: Determines which part is exchanged at which step.
            momentum: The outer optimizer's Nesterov momentum.
        """
        super().__init__(context)
        self._frequency = frequency
        self._momentum = momentum
        self._step = 0
        self._restored = False
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

    def before_update(self, optimizer: Optimizer) -> bool:
        """Copies the initial weights for the first outer gradient, before the first step.

        Not earlier: a job loads a checkpoint of its model after it has wrapped it.
        """
        del optimizer
        for fragment in self._fragments:
            if not fragment.outer:
                fragment.outer = [p.detach().clone() for p in fragment.parameters]
                fragment.momentum = self._zeros(fragment)
        return True

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Starts the exchanges of this step, and applies those that are due."""
        del optimizer
        step, self._step = self._step, self._step + 1
        for fragment in self._fragments:
            self._send_again(fragment)
        for index in self._starting(step):
            fragment = self._fragments[index]
            fragment.gradient = [
                outer - parameter.detach()
                for outer, parameter in zip(fragment.outer, fragment.parameters, strict=True)
            ]
            fragment.sent = fragment.exchange.start(fragment.gradient, _NAME)
            fragment.due = step + self._delay
        for fragment in self._fragments:
            if fragment.sent is not None and fragment.due == step:
                self._apply(fragment, self._finish(fragment))

    def end(self) -> None:
        """Waits for all messages."""
        for fragment in self._fragments:
            if fragment.sent is not None:
                self._finish(fragment)

    def state(self) -> dict[str, Any]:
        """The number of the step, and each fragment's tensors."""
        return {
            "step": self._step,
            "fragments": [
                {
                    "outer": fragment.outer,
                    "momentum": fragment.momentum,
                    "gradient": fragment.gradient,
                    "due": fragment.due,
                }
                for fragment in self._fragments
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the tensors; messages that were in flight are sent again with the next step."""
        fragments = state["fragments"]
        if len(fragments) != len(self._fragments):
            raise ValueError(f"it has {len(fragments)} fragments, not {len(self._fragments)}")
        for fragment, saved in zip(self._fragments, fragments, strict=True):
            fragment.outer = like_parameters(fragment.parameters, saved["outer"])
            fragment.momentum = (
                like_parameters(fragment.parameters, saved["momentum"])
                if self._momentum and saved["momentum"]
                else self._zeros(fragment)
            )
            gradient = saved["gradient"]
            fragment.due = int(saved["due"])
            fragment.gradient = (
                None if gradient is None else like_parameters(fragment.parameters, gradient)
            )
        self._step = int(state["step"])
        self._restored = True

    def _send_again(self, fragment: _Fragment) -> None:
        """After a checkpoint was loaded: sends the messages that were in flight when it was
        saved."""
        if self._restored:
            self._restored = fragment is not self._fragments[-1]
            gradient = fragment.gradient
            if fragment.sent is not None:  # of the training that was left
                self._finish(fragment)
            if gradient is not None:
                fragment.gradient = gradient
                fragment.sent = fragment.exchange.start(gradient, _NAME)

    def _finish(self, fragment: _Fragment) -> list[torch.Tensor]:
        """Waits for a fragment's average."""
        sent, fragment.sent, fragment.gradient = fragment.sent, None, None
        return fragment.exchange.finish(sent, _NAME)

    def _zeros(self, fragment: _Fragment) -> list[torch.Tensor]:
        if not self._momentum:
            return []
        return [torch.zeros_like(parameter.detach()) for parameter in fragment.parameters]

    def _starting(self, step: int) -> Sequence[int]:
        if isinstance(self._frequency, DiLoCo):
            return [0] if self._frequency.steps_after(step) else []
        return self._frequency.starts_after(step)

    def _fragment(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> _Fragment:
        exchange = ParameterExchange(parameters, self.context.exchange())
        return _Fragment([parameter for _, parameter in parameters], exchange)

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


def like_parameters(
    parameters: Sequence[torch.nn.Parameter], saved: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Saved tensors with the shapes, types and devices of the parameters.

    Raises:
        ValueError: The shapes differ.
    """
    if [tuple(t.shape) for t in saved] != [tuple(p.shape) for p in parameters]:
        raise ValueError("its parameters have other shapes, or are split in another way")
    return [
        tensor.detach().to(parameter.device, parameter.dtype, copy=True)
        for tensor, parameter in zip(saved, parameters, strict=True)
    ]
