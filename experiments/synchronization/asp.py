"""Asynchronous parallel: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddltrace.experiments.synchronization.rule import ServerRule


@dataclass(frozen=True)
class Asp(ServerRule):
    """Each push is applied and each read answered at once: no worker waits for another."""

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """There is none."""
        del seconds
