"""Distinguishes signals to the launcher's whole process group from signals to the launcher
alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# A signal to a group reaches its processes one after the other.
_DELIVERY_S: Final = 0.02


class GroupSignals:
    """A process of the launcher's process group in which signals to the group stay pending.

    The job runs in the same group, and so has received each of these signals already: if the
    launcher forwarded it, the job would receive it twice. This matters: torchrun, which shuts its
    workers down on the first SIGTERM, leaves them behind if more arrive meanwhile. `timeout` sends
    its signal to its child and to the group.
    """

    def __init__(self) -> None:
        self._start()

    def includes(self, number: int) -> bool:
        """Whether a signal that the launcher has received was sent to its whole group.

        Args:
            number: The signal, which is blocked in this thread.
        """
        time.sleep(_DELIVERY_S)
        if not self._has_pending(number):
            return False
        signal.sigtimedwait({number}, 0)  # sent to the launcher as well
        self.forget()
        return True

    def forget(self) -> None:
        """Forgets the signals that were sent so far."""
        self.stop()
        self._start()

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start(self) -> None:
        """Starts the process, with the signals that are blocked in this thread blocked."""
        self._process: subprocess.Popen[bytes] | None = None
        if not Path("/proc/self/status").exists():  # not Linux
            return
        with contextlib.suppress(OSError):
            # It ends at the end of its input, also when the launcher is killed.
            self._process = subprocess.Popen(
                ["cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )

    def _has_pending(self, number: int) -> bool:
        if self._process is None:
            return False
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
            for line in status.splitlines():
                if line.startswith("ShdPnd:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False


@contextlib.contextmanager
def group_signals() -> Iterator[GroupSignals]:
    """Runs a `GroupSignals`; call it while the signals to distinguish are blocked."""
    signals = GroupSignals()
    try:
        yield signals
    finally:
        signals.stop()


def shares_group(pid: int) -> bool:
    """Whether a process is in the process group of this one."""
    try:
        return os.getpgid(pid) == os.getpgrp()
    except OSError:
        return False
