"""Local SGD: Stich, ICLR 2019, arXiv 1805.09767."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.technique import technique


@technique(
    "frequency",
    "localsgd",
    "ranks train alone and average parameters; a codec encodes the differences",
    "Local SGD, arXiv 1805.09767",
)
@dataclass(frozen=True)
class LocalSgd(Frequency):
    """Every rank trains alone; after every `period` updates the parameters are averaged.

    With a codec the ranks exchange, in encoded form, how far each has come since the last
    average.

    Attributes:
        period: Updates from one average to the next, H.
    """

    exchanges: ClassVar[Exchanged] = "parameters"
    period: int = 8

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError("period must be at least 1")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

    def exchanges_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in update number `step`, from 0: never."""
        del step
        return False

    def averages_after(self, step: int) -> bool:
        """Whether parameters are averaged after update number `step`, from 0."""
        return (step + 1) % self.period == 0
