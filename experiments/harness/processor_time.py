"""The processor time that other processes used while a job ran."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Fields of the kernel's line ``cpu`` of idle cores: with nothing to do, or waiting for a disk."""
_GUEST: Final = 8
"""From this field on, time is counted twice: guests' time is in the user's."""


class OtherCores:
    """Compares the machine's processor time with that of this process and its ended children."""

    def __init__(self) -> None:
        """Begins to measure."""
        self._busy, self._own = _busy_seconds(), _own_seconds()
        self._start = time.monotonic()

    def mean(self) -> float | None:
        """Cores that were busy with other work since the start, in the mean.

        Returns:
            At least 0; None where the kernel does not say how busy it was.
        """
        busy, wall = _busy_seconds(), time.monotonic() - self._start
        if self._busy is None or busy is None or wall <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_seconds() - self._own)) / wall)


def exceeds(other_cores: float | None, limit: float | None) -> bool:
    """Whether more cores than the limit are known to be busy with other work; None: no limit."""
    return other_cores is not None and limit is not None and other_cores > limit


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine's start."""
    try:
        fields = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    busy = sum(field for n, field in enumerate(fields[:_GUEST]) if n not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Seconds that this process and its ended descendants have worked."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
