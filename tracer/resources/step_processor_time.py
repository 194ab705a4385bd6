"""Reads the processor time of the rank's process at ends of steps, for its use in each step."""

from __future__ import annotations

import time
from typing import Final

from ddltrace.tracer.resources.counter_thread import CounterThread
from ddltrace.tracer.trace.counters import Reading

_PAUSE_NS: Final = 200_000_000
"""Least time between two readings: a reading is a system call, on the thread that trains."""


class StepProcessorTime:
    """Called at the end of each step, on the thread that trains.

    Args:
        counters: Writes the readings.
    """

    def __init__(self, counters: CounterThread) -> None:
        self._counters = counters
        self._due_ns = 0

    def after_step(self, step: int) -> None:
        """Reads the processor time of all threads of this process, if a reading is due."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + _PAUSE_NS
            self._counters.add(now_ns, step, Reading("process_cpu_time", time.process_time()))
