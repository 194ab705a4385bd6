"""Grouped synchronization: groups average every step, all ranks every few steps.

Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, call it hierarchical local
SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.technique import technique


@technique(
    "synchronization",
    "grouped",
    "groups average gradients in each step, all ranks parameters every few steps",
    "Lin et al., ICLR 2020",
)
@dataclass(frozen=True)
class Grouped(Synchronization):
    """Averages gradients within groups in each step, and parameters over all ranks periodically.

    Attributes:
        size: Consecutive ranks in a group; the last group may be smaller.
        every: After how many steps the parameters of all ranks are averaged.
    """

    place: ClassVar[Place] = "groups"

    size: int = 2
    every: int = 8

    def __post_init__(self) -> None:
        if self.size < 1 or self.every < 1:
            raise ValueError("size and every must be at least 1")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.every

    def groups(self, ranks: int) -> list[list[int]]:
        """The groups.

        Args:
            ranks: Number of ranks.
        """
        return [
            list(range(start, min(start + self.size, ranks)))
            for start in range(0, ranks, self.size)
        ]

    def averages_after(self, step: int) -> bool:
        """Whether all ranks average their parameters after a step, counted from 0."""
        return (step + 1) % self.every == 0
