"""LAMB: You et al., ICLR 2020, arXiv 1904.00962."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.optimizer_rules.optimizer_rule import (
    OptimizerRule,
    adam_direction,
    check_warmup,
    dense_gradient,
    update_number,
    warmup_share,
    wide,
)
from ddltrace.experiments.technique import technique

if TYPE_CHECKING:
    from torch.optim import Optimizer


@technique(
    "optimizer",
    "lamb",
    "Adam with layer-wise rates and warm-up, for large batches",
    "LAMB, arXiv 1904.00962",
)
@dataclass(frozen=True)
class Lamb(OptimizerRule):
    """Adam whose update is, layer by layer, as long as the weights.

    r = m_hat / (sqrt(v_hat) + eps) + wd w; w <- w - lr trust r with the trust ratio |w| / |r|, 1
    where a norm is zero. Learning rate, weight decay, betas and eps are those of the job's
    optimizer, where it has them.

    Both moments are kept in float32 for 16-bit parameters.

    Attributes:
        trust_min: Least trust ratio.
        trust_max: Greatest trust ratio. With both at 1 the rule is AdamW.
        warmup: Updates in which the learning rate rises linearly from 1 / warmup of it.
    """

    trust_min: float = 0.0
    trust_max: float = 10.0
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.trust_min <= self.trust_max:
            raise ValueError("trust_min must be at least 0 and at most trust_max")
        check_warmup(self.warmup)

    def update(
        self, optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Updates each parameter as a layer of its own."""
        with torch.no_grad():
            for parameter in parameters:
                state = optimizer.state[parameter]
                count = update_number(state)
                weight, gradient = wide(parameter), wide(dense_gradient(parameter))
                update = adam_direction(state, count, group, weight, gradient)
                rate = float(group["lr"]) * warmup_share(count, self.warmup)
                weight_norm, update_norm = (
                    torch.linalg.vector_norm(weight),
                    torch.linalg.vector_norm(update),
                )
                zero = (weight_norm == 0) | (update_norm == 0)
                trust = torch.where(zero, torch.ones_like(weight_norm), weight_norm / update_norm)
                trust = trust.clamp(self.trust_min, self.trust_max)
                parameter.sub_(update.mul_(rate * trust).to(parameter.dtype))
