"""The largest resident memory of a process, as the kernel counts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_HIGH_WATER: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_memory_bytes(pid: int | str = "self") -> int | None:
    """Peak resident memory of a process so far (``VmHWM``, proc_pid_status(5)).

    Args:
        pid: The process; this one by default.

    Returns:
        Bytes; None if the process is gone or the system does not tell.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = _HIGH_WATER.search(status)
    return int(found[1]) * 1024 if found else None
