"""What the tracer's background threads have in common: they come after the job."""

from __future__ import annotations

import contextlib
import os
import threading
import time


def lower_priority() -> None:
    """Has the calling thread not preempt others when it wakes up.

    It has time until its next turn; a rank that is interrupted makes all others wait for it.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def until_next(interval_s: float) -> float:
    """The time until the next multiple of the interval on the wall clock.

    All ranks write at the same moments: a rank that is delayed delays all ranks that wait for it,
    so simultaneous writes delay the job once.
    """
    left_s = interval_s - time.time() % interval_s
    # A thread that wakes a moment too early has not missed anything.
    return left_s if left_s > interval_s / 8 else left_s + interval_s
