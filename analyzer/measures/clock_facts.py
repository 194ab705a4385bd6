"""How clocks were aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.measures.measure import Whole, derived
from ddltrace.analyzer.trace.align import SHARED


@dataclass(frozen=True)
class RankClockFacts:
    """The offset of a rank's clock from rank 0's clock.

    Attributes:
        rank: Global rank.
        offset_us: Offset that is added to the rank's times, at its first event.
        drift_ppm: Change of the offset, microseconds per second of the rank's clock.
        residual_us: Bound on the remaining error; None if it is unknown.
        method: How the offset was found: ``shared clock``, ``exchanges with rank 0``,
            ``exchanges with rank 0 and messages``, ``messages``, ``wall clocks`` or ``none``.
    """

    rank: int
    offset_us: float
    drift_ppm: float
    residual_us: float | None
    method: str


@dataclass(frozen=True)
class ClockFacts:
    """How clocks were aligned. Differences across ranks below `max_residual_us` are unsure.

    Attributes:
        method: The ranks' methods as in `RankClockFacts.method`, except for shared clocks.
        max_residual_us: The largest residual of all ranks; None if the residual of one rank is
            unknown.
        ranks: By rank.
    """

    method: str
    max_residual_us: float | None
    ranks: tuple[RankClockFacts, ...]


def _clock_facts(whole: Whole) -> ClockFacts:
    """How the clocks of a trace were aligned."""
    trace, residual = whole.trace, whole.residual_ns
    clocks = list({clock.rank: clock for clock in trace.clocks.values()}.values())
    methods: Sequence[str] = sorted({clock.method for clock in clocks if clock.method != SHARED})
    return ClockFacts(
        method=", ".join(methods) or SHARED,
        max_residual_us=None if residual is None else residual / 1e3,
        ranks=tuple(
            RankClockFacts(
                rank=clock.rank,
                offset_us=clock.offset_ns / 1e3,
                drift_ppm=clock.drift * 1e6,
                residual_us=None if clock.residual_ns is None else clock.residual_ns / 1e3,
                method=clock.method,
            )
            for clock in sorted(clocks, key=lambda clock: clock.rank)
        ),
    )


CLOCK: Final = derived("clock", _clock_facts)
