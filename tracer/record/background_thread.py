"""Scheduling of the tracer's background threads, which give way to the job."""

from __future__ import annotations

import contextlib
import os
import threading
import time


def lower_priority() -> None:
    """Lowers the calling thread's priority, so that it does not preempt others when it wakes up.

    A delay of this thread is harmless, but an interrupted rank makes all others wait.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def until_next(interval_s: float) -> float:
    """The time until the next multiple of the interval on the wall clock.

    All ranks write at the same moments: a rank that is delayed delays all ranks that wait for it,
    so simultaneous writes delay the job once.
    """
    left_s = interval_s - time.time() % interval_s
    # A thread that wakes up slightly too early waits for the interval that begins next.
    return left_s if left_s > interval_s / 8 else left_s + interval_s
