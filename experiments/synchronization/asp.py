"""Asynchronous parallel: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.technique import technique


@technique(
    "synchronization",
    "asp",
    "no worker waits for another",
    "Dean et al., NeurIPS 2012",
    needs=("servers in processes of their own: one, or as ps:servers=N says",),
)
@dataclass(frozen=True)
class Asp(ServerRule):
    """Each push is applied and each read answered at once: no worker waits for another."""

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """There is none."""
        del seconds
