"""LARS: You, Gitman & Ginsburg, arXiv 1708.03888."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Lars:
    """SGD with momentum whose rate is, layer by layer, in proportion to the weights' norm.

    rate = eta |w| / (|g| + wd |w|); v <- m v + lr rate (g + wd w); w <- w - v. Learning rate and
    weight decay are those of the job's optimizer. Where a norm is zero, rate is 1.

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


def check_warmup(warmup: int) -> None:
    """Raises ValueError unless the warm-up is a number of updates."""
    if warmup < 0:
        raise ValueError("warmup must be a number of steps")


def warmup_share(step: int, warmup: int) -> float:
    """The share of the learning rate that holds in an update.

    Goyal et al., arXiv 1706.02677, section 2.2.

    Args:
        step: Number of the update, from 1.
        warmup: Updates until all of it holds.
    """
    return min(1.0, step / warmup) if warmup else 1.0
