"""How much equal runs differ: published measurements, below which one run a side decides nothing.

`benchmarks/verdicts.py` measures the numbers; docs/measurements.md says on what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.model import Analysis

_MIN_WAIT: Final = 0.1
"""From this share of time on that a rank's main thread waits for a processor, a run is busy."""


@dataclass(frozen=True)
class RunNoise:
    """What 99 of 100 pairs of equal runs differ by at most.

    Attributes:
        condition: ``idle`` or ``busy``: whether the ranks waited for processors.
        step: Difference of the mean steps, as a share of their mean.
        part: Difference of a part of the critical path, as a share of the step.
        share: Difference of a share of the step.
    """

    condition: str
    step: float
    part: float
    share: float

    @property
    def article(self) -> str:
        """The condition of a machine, with its article."""
        return "an idle" if self.condition == "idle" else "a busy"


IDLE: Final = RunNoise("idle", step=0.11, part=0.06, share=0.06)
BUSY: Final = RunNoise("busy", step=0.95, part=0.7, share=0.14)


def noise_between(runs: Sequence[Analysis], *, several: bool) -> RunNoise:
    """The published noise for runs.

    Args:
        runs: The runs of both sides.
        several: Whether a side has several runs, which show their own noise: then the published
            one is the least that is possible, that of an idle machine. Otherwise, a run without
            counters may have been busy.
    """
    return IDLE if several or all(_was_idle(run) for run in runs) else BUSY


def _was_idle(run: Analysis) -> bool:
    """Whether counters show that no rank waited for a processor for long."""
    shares = [row.cpu_wait_share for row in run.resources]
    return bool(shares) and all(share is not None and share < _MIN_WAIT for share in shares)
