"""Whether the process that writes a trace still runs, as far as its host can be asked."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Final

from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.trace_files import event_path

_SURELY_IDLE_S: Final = 5.0


def pid_namespace() -> str:
    """What tells the processes of one container from those of another; empty if nothing does."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_gone(pid: int, of: RankInfo | RunInfo) -> bool:
    """Whether a process is sure not to run any more, as far as its own host can be asked.

    Args:
        pid: Its number.
        of: Says where it was a process.
    """
    if of.host != platform.node() or not Path("/proc/self").exists():
        return False
    if of.pid_namespace and of.pid_namespace != pid_namespace():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state[:1] in (["Z"], ["X"])  # dead, and nobody has asked for its status


def has_died(directory: Path, info: RankInfo) -> bool:
    """Whether a process that did not close its trace is sure to be gone."""
    if info.pid is None or not is_gone(info.pid, info):
        return False
    if info.pid_namespace:
        return True
    # One in another container may only seem to be gone; then it goes on writing.
    try:
        written_s = event_path(directory, info.segment).stat().st_mtime
    except OSError:
        return False
    return time.time() - written_s > _SURELY_IDLE_S


def is_running(directory: Path, info: RankInfo) -> bool:
    """Whether the process of a rank is sure to run."""
    if info.pid is None or info.host != platform.node() or is_gone(info.pid, info):
        return False
    try:
        environment = Path(f"/proc/{info.pid}/environ").read_bytes()
    except OSError:
        return False
    # Its number may have gone to another process.
    return json.dumps(str(directory)).encode() in environment
