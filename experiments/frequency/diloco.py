"""DiLoCo: Douillard et al., arXiv 2311.08105; with a codec and feedback SparseLoCo's rule.

SparseLoCo: Sarfi et al., arXiv 2508.15706: the error-feedback buffer takes the place of the
outer momentum. Streaming DiLoCo: Douillard et al., arXiv 2501.18512.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ddltrace.experiments.frequency.frequency import (
    ParameterAverage,
    Periodic,
    StepContext,
    StepPolicy,
    like_parameters,
)
from ddltrace.experiments.frequency.parameter_exchange import ParameterExchange
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_NAME = "outer gradient"


@technique(
    "frequency",
    "diloco",
    "ranks train alone; an outer Nesterov step on the averaged distance",
    "DiLoCo, arXiv 2311.08105; with topk+feedback SparseLoCo, arXiv 2508.15706",
    needs=("memory for a copy of the parameters",),
)
@dataclass(frozen=True)
class DiLoCo(Periodic):
    """Every rank trains alone; after `period` updates an outer optimizer takes one step.

    Its gradient is the weights of the last outer step minus the local weights, averaged over
    the ranks. The inner optimizer's state stays local.

    Attributes:
        period: Inner updates for one outer step, H.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum. By default 0.9, and 0 beside `feedback`.
    """

    period: int = 500
    outer_lr: float = 0.7
    outer_momentum: float | None = None

    def __post_init__(self) -> None:
        check_outer(self.period, self.outer_lr, self.outer_momentum)

    def policy(self, context: StepContext) -> StepPolicy:
        """Outer steps of the whole model as one fragment, without delay."""
        whole = StreamingDiLoCo(
            self.period,
            fragments=1,
            delay=0,
            alpha=1.0,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
        )
        return whole.policy(context)


@technique(
    "frequency",
    "streaming_diloco",
    "DiLoCo by fragments, each exchanged while training continues",
    "Streaming DiLoCo, arXiv 2501.18512",
    needs=("memory for a copy of the parameters",),
)
@dataclass(frozen=True)
class StreamingDiLoCo(Periodic):
    """DiLoCo by fragments of the model, each at a step of its own, overlapped with training.

    Attributes:
        period: Inner updates between two outer steps of one fragment, H.
        fragments: Number of fragments.
        delay: Inner updates that run while a fragment is exchanged, tau.
        alpha: Weight of the global fragment when it is mixed into the local one; 1 takes it
            as it is.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum. By default 0.9, and 0 beside `feedback`.
    """

    period: int = 100
    fragments: int = 4
    delay: int = 1
    alpha: float = 0.5
    outer_lr: float = 0.7
    outer_momentum: float | None = None

    def __post_init__(self) -> None:
        check_outer(self.period, self.outer_lr, self.outer_momentum)
        if not 1 <= self.fragments <= self.period:
            raise ValueError("fragments must be between 1 and period")
        if not 0 <= self.delay < self.period:
            raise ValueError("delay must be at least 0 and below period")
        if not 0 < self.alpha <= 1:
            raise ValueError("alpha must be above 0 and at most 1")

    def policy(self, context: StepContext) -> StepPolicy:
        """Outer steps."""
        return OuterStepPolicy(context, self)

    def starts_after(self, step: int) -> list[int]:
        """The fragments whose exchange starts after inner update number `step`, from 0.

        The last fragment starts with the period's last update, the others period / fragments
        apart before it.
        """
        place = (step + 1) % self.period
        return [
            fragment
            for fragment in range(self.fragments)
            if (fragment + 1) * self.period // self.fragments % self.period == place
        ]

    def averages_after(self, step: int, ranks: int) -> list[ParameterAverage]:
        """Those of the fragments whose exchange starts after a step."""
        everyone = list(range(ranks))
        return [ParameterAverage(each, everyone, self.delay) for each in self.starts_after(step)]

    def split(self, sizes: Sequence[int]) -> list[list[int]]:
        """The parameters of each fragment: consecutive ones, of about equal size."""
        parts: list[list[int]] = [[] for _ in range(self.fragments)]
        total = max(1, sum(sizes))
        before = 0
        for index, size in enumerate(sizes):
            middle = before + size / 2
            parts[min(self.fragments - 1, int(middle * self.fragments / total))].append(index)
            before += size
        return parts


def check_outer(period: int, rate: float, momentum: float | None) -> None:
    """Raises ValueError unless the outer optimizer's settings can be used."""
    if period < 1:
        raise ValueError("period must be at least 1")
    if not 0 < rate < math.inf:
        raise ValueError("outer_lr must be a positive number")
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError("outer_momentum must be at least 0 and below 1")


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

    def __init__(self, context: StepContext, diloco: StreamingDiLoCo) -> None:
        """Plans the fragments.

        Args:
            context: What the policy works on.
            diloco: Determines which part is exchanged at which step.
        """
        super().__init__(context)
        self._diloco = diloco
        momentum = diloco.outer_momentum
        if momentum is None:
            momentum = 0.0 if context.keeps_residuals else 0.9
        self._momentum = momentum
        self._step = 0
        self._restored = False
        self._fragments = []
        for part in diloco.split([parameter.numel() for _, parameter in context.parameters]):
            own = [context.parameters[index] for index in part]
            exchange = ParameterExchange(own, context.exchange())
            self._fragments.append(_Fragment([parameter for _, parameter in own], exchange))

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

    def after_update(self, optimizer: Optimizer) -> None:
        """Starts the exchanges of this step, and applies those that are due."""
        del optimizer
        step, self._step = self._step, self._step + 1
        for fragment in self._fragments:
            self._send_again(fragment)
        for index in self._diloco.starts_after(step):
            fragment = self._fragments[index]
            fragment.gradient = [
                outer - parameter.detach()
                for outer, parameter in zip(fragment.outer, fragment.parameters, strict=True)
            ]
            fragment.sent = fragment.exchange.start(fragment.gradient, _NAME)
            fragment.due = step + self._diloco.delay
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

    def _apply(self, fragment: _Fragment, averages: Sequence[torch.Tensor]) -> None:
        """One step of SGD with Nesterov momentum on the outer weights, mixed into the model."""
        rate = self._diloco.outer_lr
        for index, (parameter, outer) in enumerate(
            zip(fragment.parameters, fragment.outer, strict=True)
        ):
            update = averages[index]
            if self._momentum:
                momentum = fragment.momentum[index]
                momentum.mul_(self._momentum).add_(update)
                update = update.add(momentum, alpha=self._momentum)
            outer.sub_(update, alpha=rate)
            if self._diloco.alpha == 1.0:
                parameter.copy_(outer)
            else:
                parameter.lerp_(outer, self._diloco.alpha)
