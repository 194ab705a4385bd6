"""Reads the peak resident memory of processes from the kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ddltrace.tracer.trace.trace_files import STREAM_SUFFIX

_HIGH_WATER: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_memory_bytes(pid: int | str = "self") -> int | None:
    """Peak resident memory of a process so far (``VmHWM``, proc_pid_status(5)).

    Args:
        pid: The process; this one by default.

    Returns:
        Bytes; None if the process has ended or the system does not provide it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = _HIGH_WATER.search(status)
    return int(found[1]) * 1024 if found else None


class RankMemory:
    """Watches the rank processes of a traced job from outside, while it runs.

    Attributes:
        peaks: Largest resident memory seen of each rank process, bytes, by process id.
    """

    def __init__(self, trace: Path) -> None:
        """Stores the trace directory.

        Args:
            trace: The job's trace directory, in which the files of each rank process carry its
                process id.
        """
        self._trace = trace
        self.peaks: dict[int, int] = {}

    def sample(self) -> None:
        """Reads the peaks so far of the ranks that run now."""
        for stream in self._trace.glob(f"rank-*{STREAM_SUFFIX}"):
            pid = int(stream.stem.rpartition("-")[2])
            peak = peak_memory_bytes(pid)
            if peak is not None:
                self.peaks[pid] = max(peak, self.peaks.get(pid, 0))
