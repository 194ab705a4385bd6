"""LAMB: You et al., ICLR 2020, arXiv 1904.00962."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.optimizer_rules.lars import check_warmup


@dataclass(frozen=True)
class Lamb:
    """Adam whose update is, layer by layer, as long as the weights.

    r = m_hat / (sqrt(v_hat) + eps) + wd w; w <- w - lr trust r with the trust ratio |w| / |r|, 1
    where a norm is zero. Learning rate, weight decay, betas and eps are those of the job's
    optimizer, where it has them.

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
