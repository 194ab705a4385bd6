"""Rules by which workers run ahead of each other.

Stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NeurIPS 2013. Asynchronous parallel: Dean et al., "Large Scale
Distributed Deep Networks", NeurIPS 2012.

Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS
2019, choose the bound from measured intervals between pushes, within a given range. `AdaptiveSsp`
takes the number of steps by which the slowest worker has fallen behind in its last steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.technique import technique

MAX_BOUND = 1000


@technique(
    "synchronization",
    "ssp",
    "a worker may be at most bound steps ahead of the slowest one",
    "Ho et al., NeurIPS 2013",
    needs=("servers in processes of their own: one, or as ps:servers=N says",),
)
@dataclass(frozen=True)
class Ssp(ServerRule):
    """A worker begins step c only if every worker has pushed at least c - bound updates.

    What it reads then holds all updates up to c - bound - 1 of every worker, and those that have
    come since.

    Attributes:
        bound: How many steps a worker may be ahead of the slowest one.
    """

    bound: int = 3

    def __post_init__(self) -> None:
        if not 0 <= self.bound <= MAX_BOUND:
            raise ValueError(f"bound must be 0 to {MAX_BOUND}")

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """The bound of the spec."""
        del seconds
        return self.bound


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


_NOISE = 0.25
"""Steps of lateness that do not count: two workers never take exactly the same time."""


@technique(
    "synchronization",
    "adaptive_ssp",
    "ssp whose bound follows the measured lateness of the slowest worker",
    "Zhao et al., ICDCS 2019",
    needs=("servers in processes of their own: one, or as ps:servers=N says",),
)
@dataclass(frozen=True)
class AdaptiveSsp(ServerRule):
    """Measures the slowest worker's lateness in steps, and takes it as the bound.

    Lateness is the largest sum of consecutive delays of one worker within its last steps; a
    delay is the time of a step over the median step of all workers, in such median steps. A
    worker that is slow for a burst of steps is late by what the burst costs, and that many steps
    ahead hide the burst. Without a straggler the bound is `lowest`.

    Attributes:
        lowest: The bound never gets smaller.
        highest: The bound never gets larger.
        window: Number of each worker's last steps to measure.
    """

    lowest: int = 1
    highest: int = 16
    window: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= MAX_BOUND:
            raise ValueError(f"lowest and highest must be 0 to {MAX_BOUND}, lowest no larger")
        if not 1 <= self.window <= MAX_BOUND:
            raise ValueError(f"window must be 1 to {MAX_BOUND}")

    def history(self) -> int:
        """As `window` says."""
        return self.window

    def bound_for(self, seconds: Mapping[int, Sequence[float]]) -> int:
        """The lateness of the slowest worker, rounded up, within the range."""
        times = [time for own in seconds.values() for time in own[-self.window :]]
        median = statistics.median(times) if times else 0.0
        if median <= 0.0:
            return self.lowest
        lateness = max(_largest_run(own[-self.window :], median) for own in seconds.values())
        return min(self.highest, max(self.lowest, math.ceil(lateness - _NOISE)))


def _largest_run(times: Sequence[float], median: float) -> float:
    """The largest sum of consecutive delays, in steps of the median time."""
    largest = current = 0.0
    for time in times:
        current = max(0.0, current + time / median - 1.0)
        largest = max(largest, current)
    return largest
