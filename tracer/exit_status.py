"""Exit statuses as shells give them: a process's own, 128 + n when signal n killed it."""

from __future__ import annotations

import contextlib
import signal
from typing import Final

SIGNALLED: Final = 128
"""Above it, it tells the signal that killed the process."""


def shell_status(return_code: int) -> int:
    """The status for a return code of Python's, which is -n when signal n killed the process."""
    return return_code if return_code >= 0 else SIGNALLED - return_code


def signal_name(status: int) -> str | None:
    """The signal that killed a process of this status; None if none did."""
    if status > SIGNALLED:
        with contextlib.suppress(ValueError):
            return signal.Signals(status - SIGNALLED).name
    return None


def status_text(status: int) -> str:
    """A status in words: ``killed by SIGKILL``, ``exit status 3``."""
    name = signal_name(status)
    return f"exit status {status}" if name is None else f"killed by {name}"
