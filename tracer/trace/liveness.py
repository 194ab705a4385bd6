"""Determines whether the process that writes a trace still runs, if it ran on this host."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Final

from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.trace_files import event_path

STATE: Final = 0
EXIT_CODE: Final = 49
START_TIME: Final = 19
"""Places in the result of `stat_fields`; the start in clock ticks since boot."""

_SURELY_IDLE_S: Final = 5.0


def pid_namespace() -> str:
    """An identifier of this process's PID namespace (container); empty if it is not available."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_gone(pid: int, of: RankInfo | RunInfo) -> bool:
    """Whether a process has certainly ended; false if that cannot be determined.

    Args:
        pid: Process id.
        of: Names the host and the PID namespace of the process.
    """
    if of.host != platform.node() or not Path("/proc/self").exists():
        return False
    if of.pid_namespace and of.pid_namespace != pid_namespace():
        return False
    try:
        fields = stat_fields(pid)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return fields[STATE : STATE + 1] in (
        ["Z"],
        ["X"],
    )  # a zombie: dead, but its parent has not waited for it


def stat_fields(pid: int) -> list[str]:
    """The fields of a process's ``/proc/PID/stat`` from its state on, which is the third.

    Raises:
        OSError: There is no such process, or no ``/proc``.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the program's name in parentheses and may contain anything.
    return text.rpartition(")")[2].split()


def has_died(directory: Location, info: RankInfo) -> bool:
    """Whether a process that did not close its trace has certainly ended."""
    if info.pid is None or not is_gone(info.pid, info):
        return False
    if info.pid_namespace:
        return True
    # A process in another container may only appear to be gone while it continues writing.
    try:
        written_s = event_path(directory, info.segment).stat().st_mtime
    except OSError:
        return False
    return time.time() - written_s > _SURELY_IDLE_S


def is_running(directory: Path, info: RankInfo) -> bool:
    """Whether the process of a rank certainly runs."""
    if info.pid is None or info.host != platform.node() or is_gone(info.pid, info):
        return False
    return _was_started_for(directory, info.pid)  # the process id may have been reused


def takes_orders(info: RankInfo) -> bool:
    """Whether the process of a rank runs on this host and has a socket for orders."""
    if not info.control or info.pid is None or info.host != platform.node():
        return False
    return not is_gone(info.pid, info)


def processes_of(directory: Path) -> list[int]:
    """The processes of this host that were started to record into a directory and still run."""
    return sorted(
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if _was_started_for(directory, int(path.name))
    )


def _was_started_for(directory: Path, pid: int) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return json.dumps(str(directory)).encode() in environment
