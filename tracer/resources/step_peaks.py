"""The peak of a device's allocated and reserved memory in each step.

PyTorch keeps peaks since the last reset. A peak per step needs a reset after each step, but the job
may read or reset the same peaks. `StepPeaks` therefore keeps the peaks that it resets and returns
their maximum to the job: the job reads the same numbers as without the tracer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_PEAK = "peak"


class Peaks(NamedTuple):
    """Peaks of one step, in bytes."""

    allocated: int
    reserved: int


class StepPeaks:
    """Splits an allocator's peaks into steps.

    Args:
        stats: The allocator's statistics of a device: nested dicts whose leaves are counts.
        reset: Sets the allocator's peaks of a device to the current values.
    """

    def __init__(
        self, stats: Callable[[int], dict[str, Any]], reset: Callable[[int], None]
    ) -> None:
        self._stats = stats
        self._reset = reset
        self._lock = threading.Lock()
        self._of_job: dict[int, dict[str, Any]] = {}
        self._of_step: dict[int, Peaks] = {}

    def end_step(self, device: int) -> Peaks:
        """The peaks since the previous call, or since the start."""
        with self._lock:
            stats = self._stats(device)
            peaks = _larger(_peaks(stats), self._of_step.pop(device, None))
            self._of_job[device] = with_peaks(stats, self._of_job.get(device))
            self._reset(device)
            return peaks

    def stats_for_job(self, device: int) -> dict[str, Any]:
        """The statistics of a device, with the peaks since the job itself reset them."""
        with self._lock:
            return with_peaks(self._stats(device), self._of_job.get(device))

    def reset_by_job(self, device: int) -> None:
        """The job resets the peaks of a device."""
        with self._lock:
            self._of_step[device] = _larger(_peaks(self._stats(device)), self._of_step.get(device))
            self._of_job.pop(device, None)
            self._reset(device)


def with_peaks(stats: dict[str, Any], former: dict[str, Any] | None) -> dict[str, Any]:
    """Statistics whose peaks are at least those of former statistics."""
    if not former:
        return stats
    merged: dict[str, Any] = {}
    for key, value in stats.items():
        before = former.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = with_peaks(value, before)
        elif key == _PEAK and before is not None:
            merged[key] = max(value, before)
        else:
            merged[key] = value
    return merged


def _peaks(stats: dict[str, Any]) -> Peaks:
    return Peaks(
        int(stats["allocated_bytes"]["all"][_PEAK]), int(stats["reserved_bytes"]["all"][_PEAK])
    )


def _larger(one: Peaks, other: Peaks | None) -> Peaks:
    if other is None:
        return one
    return Peaks(max(one.allocated, other.allocated), max(one.reserved, other.reserved))
