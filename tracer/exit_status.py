"""Exit statuses in the shell's convention: the process's own, or 128 + n if signal n killed it."""

from __future__ import annotations

import contextlib
import signal
from typing import Final

SIGNALLED: Final = 128
"""Statuses above it encode the signal that killed the process."""


def shell_status(return_code: int) -> int:
    """Converts a return code of `subprocess`, which is -n if signal n killed the process."""
    return return_code if return_code >= 0 else SIGNALLED - return_code


def signal_name(status: int) -> str | None:
    """The name of the signal that a status encodes; None if the process exited by itself."""
    if status > SIGNALLED:
        with contextlib.suppress(ValueError):
            return signal.Signals(status - SIGNALLED).name
    return None


def status_text(status: int) -> str:
    """Describes a status: ``killed by SIGKILL``, ``exit status 3``."""
    name = signal_name(status)
    return f"exit status {status}" if name is None else f"killed by {name}"
