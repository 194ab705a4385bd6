"""NoLoCo: Kolehmainen et al., arXiv 2506.10911."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.diloco import check_outer
from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "noloco",
    "ranks train alone; outer steps with one random other rank, without a collective",
    "NoLoCo, arXiv 2506.10911",
    needs=("memory for two copies of the parameters",),
)
@dataclass(frozen=True)
class NoLoCo(Frequency):
    """Every rank trains alone; after `period` updates it takes an outer step with one other rank.

    With the weights w of the last outer step and those of now, v, and means over the two ranks:
    m <- outer_momentum m + outer_lr mean(v - w) + pull (mean(w) - w); w <- w + m. The last term
    draws the ranks together. The pairs are drawn anew for each outer step; of an odd number of
    ranks one steps alone. At the end all ranks get the mean of all.

    Attributes:
        period: Inner updates for one outer step.
        outer_lr: Factor of the mean distance.
        outer_momentum: Decay of the momentum m.
        pull: Factor of the difference from the pair's mean; by default `outer_lr`, as in the
            authors' code.
    """

    exchanges: ClassVar[Exchanged] = "parameters"
    period: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pull: float | None = None

    def __post_init__(self) -> None:
        check_outer(self.period, self.outer_lr, self.outer_momentum)
        if self.pull is not None and not 0 <= self.pull < math.inf:
            raise ValueError("pull must be a number of at least 0")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

    def steps_after(self, step: int) -> bool:
        """Whether an outer step follows inner update number `step`, from 0."""
        return (step + 1) % self.period == 0

    def partner(self, outer_step: int, rank: int, ranks: int) -> int | None:
        """The rank with which a rank takes an outer step; None for none.

        Args:
            outer_step: Number of the outer step, from 0.
            rank: The rank.
            ranks: Number of ranks.
        """
        order = list(range(ranks))
        random.Random(outer_step).shuffle(order)
        place = order.index(rank)
        other = place ^ 1
        return order[other] if other < ranks else None
