"""Post-local SGD: Lin, Stich, Patel & Jaggi, ICLR 2020, arXiv 1808.07217.

The steps are those of ``torch.distributed.algorithms``: ``PostLocalSGDState`` without gradient
averaging after `start`, and ``PeriodicModelAverager`` with ``warmup_steps=start``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "postlocalsgd",
    "synchronous at first, then local SGD",
    "Post-local SGD, arXiv 1808.07217",
)
@dataclass(frozen=True)
class PostLocalSgd(Frequency):
    """Synchronous SGD for `start` updates, then local SGD.

    Attributes:
        start: Updates with averaged gradients.
        period: Updates from one average of the parameters to the next.
    """

    exchanges: ClassVar[Exchanged] = "parameters"
    start: int = 100
    period: int = 8

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError("start must be at least 0")
        if self.period < 1:
            raise ValueError("period must be at least 1")

    @property
    def opening_steps(self) -> int:
        """The steps of synchronous SGD."""
        return self.start

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

    def exchanges_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in update number `step`, from 0."""
        return step < self.start

    def averages_after(self, step: int) -> bool:
        """Whether parameters are averaged after update number `step`, from 0.

        The first local update is followed by an average, as in PyTorch's model averager.
        """
        return step >= self.start and (step - self.start) % self.period == 0
