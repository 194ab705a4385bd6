"""Measures the overhead of recording inside the traced job (``run --measure-cost``).

Over a window of steps, recording alternates in the order on, off, off, on, so that a drift in
the machine's speed affects both sides equally; each block of four steps gives one ratio. All
ranks switch at the same steps. The steps in which recording is off are missing from the trace,
so the measurement runs only on request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    from ddltrace.tracer.record.recorder import Recorder
    from ddltrace.tracer.trace.run_info import Cost

FIRST_STEP: Final = 200
_PATTERN: Final = (False, True, True, False)
_MIN_BLOCKS: Final = 4
_RESAMPLES: Final = 2000
_INTERVAL: Final = 0.002


class CostMeter:
    """Pauses recording in half of the window's steps and compares their times with the rest.

    Args:
        recorder: The recorder to pause and resume.
        steps: Length of the window, which starts at `FIRST_STEP`; rounded down to a multiple of
            four.
        now: The clock, in nanoseconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: int,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder = recorder
        self._steps = steps - steps % len(_PATTERN)
        self._now = now
        self._ended_ns = 0
        self._times: list[int] = []

    def after_step(self, number: int) -> None:
        """Notes the end of a step and sets the recorder for the next one.

        Args:
            number: Index of the step that ended.
        """
        following = number + 1 - FIRST_STEP
        if not 0 <= following <= self._steps:
            return
        now = self._now()
        if following > 0:
            self._times.append(now - self._ended_ns)
        self._ended_ns = now
        measures = following < self._steps
        self._recorder.paused = measures and _PATTERN[following % len(_PATTERN)]

    def result(self) -> Cost | None:
        """Ratio of the time of recorded steps to that of unrecorded ones.

        Returns:
            ``ratio``, the median over the blocks, its 95 % bootstrap interval ``low`` to
            ``high``, and the number of ``steps`` on each side; None with fewer than four blocks.
        """
        import numpy as np

        blocks = len(self._times) // len(_PATTERN)
        if blocks < _MIN_BLOCKS:
            return None
        times = np.array(self._times[: blocks * len(_PATTERN)], np.float64)
        times = times.reshape(blocks, len(_PATTERN))
        off = np.array(_PATTERN)
        ratios = times[:, ~off].sum(axis=1) / times[:, off].sum(axis=1)
        # A fixed seed: the same times give the same interval.
        picks = np.random.default_rng(0).integers(0, blocks, (_RESAMPLES, blocks))
        low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
        return {
            "ratio": float(np.median(ratios)),
            "low": float(low),
            "high": float(high),
            "steps": 2 * blocks,
        }


def pooled_cost(costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cost of recording over all ranks.

    Ranks wait for each other, so the same disturbance makes the same steps longer on all of them:
    the interval of the mean is taken to be as wide as those of the ranks, not narrower.

    Args:
        costs: The result of `CostMeter.result` of each rank.

    Returns:
        The means of ``ratio``, ``low`` and ``high``, the ``steps`` on each side, and
        ``steps_needed`` on each side for an interval of 0.2 %, whose width decreases with the
        square root of their number.
    """
    ratio, low, high = (fmean(cost[key] for cost in costs) for key in ("ratio", "low", "high"))
    steps = min(cost["steps"] for cost in costs)
    needed = math.ceil(steps * ((high - low) / _INTERVAL) ** 2)
    return {"ratio": ratio, "low": low, "high": high, "steps": steps, "steps_needed": needed}


def cost_text(costs: Sequence[Mapping[str, Any]]) -> str:
    """The cost of recording over all ranks as text.

    Args:
        costs: The result of `CostMeter.result` of each rank.
    """
    pooled = pooled_cost(costs)
    text = (
        f"a step takes {pooled['ratio']:.4f} times as long with it, the mean of "
        f"{counted(len(costs), 'rank')} "
        f"(95 % interval {pooled['low']:.4f} to {pooled['high']:.4f}"
    )
    if pooled["high"] - pooled["low"] <= _INTERVAL:
        return f"{text})"
    return f"{text}; for one of 0.2 %: --measure-cost {2 * pooled['steps_needed']})"
