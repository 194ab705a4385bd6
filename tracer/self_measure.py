"""What capture costs this job, measured by the job itself.

For some steps capture is switched on and off in turn, in the order on, off, off, on, so that a
drift of the machine's speed falls on both alike. All ranks switch at the same steps. Steps
without capture leave no rows: this is done only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from ddltrace.tracer.recorder import Recorder

FIRST_STEP: Final = 20
NUM_STEPS: Final = 80
_PATTERN: Final = (False, True, True, False)
_RESAMPLES: Final = 2000


class CostMeter:
    """Pauses capture in some steps and compares their times with the others'.

    Args:
        recorder: Whose `paused` is switched.
        now: The clock.
    """

    def __init__(self, recorder: Recorder, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._recorder = recorder
        self._now = now
        self._ended_ns: int | None = None
        self._times: dict[bool, list[int]] = {False: [], True: []}

    def after_step(self, number: int) -> None:
        """To be called when a step has ended.

        Args:
            number: The step's number.
        """
        now = self._now()
        at = number - FIRST_STEP
        if 0 <= at < NUM_STEPS and self._ended_ns is not None:
            self._times[self._recorder.paused].append(now - self._ended_ns)
        self._ended_ns = now
        following = at + 1
        inside = 0 <= following < NUM_STEPS
        self._recorder.paused = inside and _PATTERN[following % len(_PATTERN)]

    def result(self) -> dict[str, Any] | None:
        """The ratio of step times with capture to those without.

        Returns:
            ``ratio`` of the medians, its 95 % bootstrap interval ``low`` to ``high``, and the
            number of ``steps`` on each side; None if there were too few.
        """
        import numpy as np

        captured, paused = (np.array(self._times[key], np.float64) for key in (False, True))
        if min(len(captured), len(paused)) < 8:
            return None
        # A fixed seed: the same times give the same interval.
        generator = np.random.default_rng(0)

        def medians(times: Any) -> Any:
            picks = generator.integers(0, len(times), (_RESAMPLES, len(times)))
            return np.median(times[picks], axis=1)

        low, high = np.percentile(medians(captured) / medians(paused), [2.5, 97.5])
        return {
            "ratio": float(np.median(captured) / np.median(paused)),
            "low": float(low),
            "high": float(high),
            "steps": min(len(captured), len(paused)),
        }
