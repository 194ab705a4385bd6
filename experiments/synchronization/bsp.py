"""Bulk synchronous parallel: Valiant, "A Bridging Model for Parallel Computation", CACM 1990."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.synchronization.rule import Place, ServerRule
from ddltrace.experiments.technique import technique


@technique(
    "synchronization",
    "bsp",
    "every rank waits for every gradient of the step; the default",
    "Valiant, CACM 1990",
)
@dataclass(frozen=True)
class Bsp(ServerRule):
    """Step c + 1 starts on every worker when the updates c of all workers are applied, as one."""

    place: ClassVar[Place] = "all"
    by_rounds: ClassVar[bool] = True

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """No worker runs ahead."""
        del seconds
        return 0
