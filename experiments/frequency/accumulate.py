"""Gradient accumulation: one exchange and one update for several backward passes.

A large batch without its memory; with LARS or LAMB the setting of You, Gitman & Ginsburg,
arXiv 1708.03888.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "accumulate",
    "one exchange and one update for several backward passes: a large batch",
    "Large Batch Training, arXiv 1708.03888",
)
@dataclass(frozen=True)
class Accumulate(Frequency):
    """The gradients of `steps` optimizer steps of the job become one exchange and one update.

    The update uses their mean, as a batch of `steps` times the size would give it.

    Attributes:
        steps: The job's steps for one update.
    """

    exchanges: ClassVar[Exchanged] = "gradients"
    steps: int = 4

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.steps

    def updates_after(self, step: int) -> bool:
        """Whether the job's step number `step`, from 0, exchanges and updates."""
        return (step + 1) % self.steps == 0
