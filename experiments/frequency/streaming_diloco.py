"""Streaming DiLoCo: Douillard et al., arXiv 2501.18512."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.diloco import check_outer
from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "streaming_diloco",
    "DiLoCo by fragments, each exchanged while training continues",
    "Streaming DiLoCo, arXiv 2501.18512",
    needs=("memory for a copy of the parameters",),
)
@dataclass(frozen=True)
class StreamingDiLoCo(Frequency):
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

    exchanges: ClassVar[Exchanged] = "parameters"
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

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

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

    def split(self, sizes: Sequence[int]) -> list[list[int]]:
        """The parameters of each fragment: consecutive ones, of about equal size.

        Args:
            sizes: Elements of each parameter.

        Returns:
            Indices of the parameters of each fragment; a fragment may be empty.
        """
        parts: list[list[int]] = [[] for _ in range(self.fragments)]
        total = max(1, sum(sizes))
        before = 0
        for index, size in enumerate(sizes):
            middle = before + size / 2
            parts[min(self.fragments - 1, int(middle * self.fragments / total))].append(index)
            before += size
        return parts
