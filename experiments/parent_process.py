"""Ties the life of a process to that of the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def end_with_parent(parent: int | None = None, number: int = signal.SIGTERM) -> None:
    """Lets the kernel send this process a signal when its parent ends.

    Args:
        parent: Process id of the parent; None if it cannot have ended yet.
        number: The signal.

    Raises:
        SystemExit: The parent has ended already.
    """
    _set_signal(number)
    if parent is not None and os.getppid() != parent:
        sys.exit(1)


def outlive_parent() -> None:
    """Undoes `end_with_parent`."""
    _set_signal(0)


def _set_signal(number: int) -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))
