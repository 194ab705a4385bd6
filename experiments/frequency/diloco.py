"""DiLoCo: Douillard et al., arXiv 2311.08105; with a codec and feedback SparseLoCo's rule.

SparseLoCo: Sarfi et al., arXiv 2508.15706: the error-feedback buffer takes the place of the
outer momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "diloco",
    "ranks train alone; an outer Nesterov step on the averaged distance",
    "DiLoCo, arXiv 2311.08105; with topk+feedback SparseLoCo, arXiv 2508.15706",
    needs=("memory for a copy of the parameters",),
)
@dataclass(frozen=True)
class DiLoCo(Frequency):
    """Every rank trains alone; after `period` updates an outer optimizer takes one step.

    Its gradient is the weights of the last outer step minus the local weights, averaged over
    the ranks. The inner optimizer's state stays local.

    Attributes:
        period: Inner updates for one outer step, H.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its Nesterov momentum. By default 0.9, and 0 beside `feedback`.
    """

    exchanges: ClassVar[Exchanged] = "parameters"
    period: int = 500
    outer_lr: float = 0.7
    outer_momentum: float | None = None

    def __post_init__(self) -> None:
        check_outer(self.period, self.outer_lr, self.outer_momentum)

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

    def steps_after(self, step: int) -> bool:
        """Whether the outer optimizer steps after inner update number `step`, from 0."""
        return (step + 1) % self.period == 0


def check_outer(period: int, rate: float, momentum: float | None) -> None:
    """Raises ValueError unless the outer optimizer's settings can be used."""
    if period < 1:
        raise ValueError("period must be at least 1")
    if not 0 < rate < math.inf:
        raise ValueError("outer_lr must be a positive number")
    if momentum is not None and not 0 <= momentum < 1:
        raise ValueError("outer_momentum must be at least 0 and below 1")
