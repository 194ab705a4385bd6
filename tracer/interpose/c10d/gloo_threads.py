"""Waits at exit until Gloo's threads have released the tensors of their messages.

A thread of Gloo first wakes up the waiting job and then releases the message's tensors. If the job
has dropped a tensor's Python object by then, the thread needs the interpreter lock to release it.
An interpreter that ends also ends a thread that asks for the lock, and C++ then aborts the process:
"terminate called without an active exception". A callback of a future that still runs has the same
effect.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")
_NAME: Final = "pt_gloo_runloop"
_POLL_S: Final = 0.002


def wait_until_idle(limit_s: float) -> None:
    """Waits until no thread of Gloo has run between two consecutive checks.

    A thread that waits for another rank counts as idle: its message may never complete.

    Args:
        limit_s: Longest time to wait, in seconds.
    """
    deadline = time.monotonic() + limit_s
    before = _progress()
    while before:
        # Releases the interpreter lock, for which such a thread may wait.
        time.sleep(_POLL_S)
        now = _progress()
        is_idle = now == before and not any(runs for runs, _ in now.values())
        if is_idle or time.monotonic() >= deadline:
            return
        before = now


def _progress() -> dict[str, tuple[bool, str]]:
    """For each thread of Gloo: whether it can run now, and how often and how long it ran."""
    found = {}
    try:
        for task in _TASKS.iterdir():
            try:
                if (task / "comm").read_text().strip() != _NAME:
                    continue
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                found[task.name] = (state == "R", (task / "schedstat").read_text())
            except OSError:
                continue  # the thread has just ended
    except OSError:
        return {}
    return found
