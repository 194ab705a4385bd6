"""LARS: You, Gitman & Ginsburg, arXiv 1708.03888."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.optimizer_rules.optimizer_rule import (
    OptimizerRule,
    check_warmup,
    dense_gradient,
    kept_buffer,
    update_number,
    warmup_share,
    wide,
)
from ddltrace.experiments.technique import STATE_PREFIX, technique

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MOMENTUM: Final = STATE_PREFIX + "momentum"
_DEFAULT_MOMENTUM: Final = 0.9


@technique(
    "optimizer",
    "lars",
    "SGD with layer-wise rates and warm-up, for large batches",
    "LARS, arXiv 1708.03888",
    needs=("a learning rate of its own: the trust coefficient multiplies it",),
)
@dataclass(frozen=True)
class Lars(OptimizerRule):
    """SGD with momentum whose rate is, layer by layer, in proportion to the weights' norm.

    rate = eta |w| / (|g| + wd |w|); v <- m v + lr rate (g + wd w); w <- w - v. Learning rate and
    weight decay are those of the job's optimizer. Where a norm is zero, rate is 1.

    Momentum is kept in float32 for 16-bit parameters.

    Attributes:
        eta: The trust coefficient.
        momentum: The factor m; by default that of the job's optimizer, or 0.9 if it has none.
        warmup: Updates in which the learning rate rises linearly from 1 / warmup of it.
    """

    eta: float = 0.001
    momentum: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.eta < math.inf:
            raise ValueError("eta must be a positive number")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError("momentum must be at least 0 and below 1")
        check_warmup(self.warmup)

    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates each parameter as a layer of its own."""
        with torch.no_grad():
            momentum = self.momentum
            if momentum is None:
                momentum = float(group.get("momentum", _DEFAULT_MOMENTUM))
            decay = float(group.get("weight_decay", 0.0))
            for parameter in parameters:
                state = optimizer.state[parameter]
                rate = float(group["lr"]) * warmup_share(update_number(state), self.warmup)
                weight, gradient = wide(parameter), wide(dense_gradient(parameter))
                weight_norm, gradient_norm = (
                    torch.linalg.vector_norm(weight),
                    torch.linalg.vector_norm(gradient),
                )
                ratio = self.eta * weight_norm / (gradient_norm + decay * weight_norm)
                zero = (weight_norm == 0) | (gradient_norm == 0)
                ratio = torch.where(zero, torch.ones_like(ratio), ratio)
                step = gradient.add(weight, alpha=decay).mul_(rate * ratio)
                if momentum:
                    velocity = kept_buffer(state, _MOMENTUM, weight)
                    step = velocity.mul_(momentum).add_(step)
                parameter.sub_(step.to(parameter.dtype))
