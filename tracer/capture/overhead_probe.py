"""What capture costs this job, measured by the job itself.

For some steps capture is switched on and off in turn, in the order on, off, off, on, so that a
drift of the machine's speed falls on both alike: each such block of four gives one ratio. All
ranks switch at the same steps. Unless it is asked for, this is done only where the ranks are
known to step together, and late, so that short jobs are recorded whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from ddltrace.tracer.record.recorder import Recorder

FIRST_STEP: Final = 200
DEFAULT_STEPS: Final = 40
_PATTERN: Final = (False, True, True, False)
_MIN_BLOCKS: Final = 4
_RESAMPLES: Final = 2000


class CostMeter:
    """Pauses capture in some steps and compares their times with the others'.

    Args:
        recorder: Whose `paused` is switched.
        steps: Number of steps from `FIRST_STEP` on in which it is switched, half of them off.
        wanted: Asked right before the first of them: whether to measure at all.
        now: The clock.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: int,
        wanted: Callable[[], bool],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder = recorder
        self._steps = steps - steps % len(_PATTERN)
        self._wanted = wanted
        self._now = now
        self._ended_ns = 0
        self._times: list[int] = []

    def after_step(self, number: int) -> None:
        """To be called when a step has ended.

        Args:
            number: The step's number.
        """
        following = number + 1 - FIRST_STEP
        if following == 0 and not self._wanted():
            self._steps = 0
        if not 0 <= following <= self._steps:
            return
        now = self._now()
        if following > 0:
            self._times.append(now - self._ended_ns)
        self._ended_ns = now
        measures = following < self._steps
        self._recorder.paused = measures and _PATTERN[following % len(_PATTERN)]

    def result(self) -> dict[str, Any] | None:
        """The ratio of step times with capture to those without.

        Returns:
            ``ratio``, the median over the blocks, its 95 % bootstrap interval ``low`` to
            ``high``, and the number of ``steps`` on each side; None if there were too few.
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
