"""The rank processes of one launcher: how they end, what their ends mean, and what stops them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ddltrace.tracer.exit_status import shell_status, status_text

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal requests the end; clean-up runs first.

    Attributes:
        number: The number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_stop_signals() -> None:
    """Raises `Stopped` at the first of these signals; the clean-up is not interrupted by others."""
    for number in _STOP_SIGNALS:
        signal.signal(number, _stop)


def ignore_stop_signals() -> None:
    """Ignores further signals."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int, frame: Any) -> NoReturn:
    ignore_stop_signals()
    raise Stopped(number)


_GRACE_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02

Ranks = Sequence["subprocess.Popen[bytes]"]


def supervise(
    ranks: Ranks, *, tolerant_from: Path | None = None, poll: Callable[[], None] = lambda: None
) -> int:
    """Waits for the end of a job, then ends every rank that still runs.

    Args:
        ranks: Its processes, each the leader of a session of its own.
        tolerant_from: From when this file exists, the death of a rank is not the end of the job;
            None: it always is.
        poll: Called again and again while the job runs.

    Returns:
        0 if all ranks ended with 0, or one of a tolerant job; else the status of the first rank
        that failed, 128 + n for signal n.
    """
    noted: set[int] = set()
    try:
        while True:
            poll()
            states = [process.poll() for process in ranks]
            failed = {rank: state for rank, state in enumerate(states) if state}
            tolerant = tolerant_from is not None and tolerant_from.exists()
            if failed and not tolerant:
                return shell_status(next(iter(failed.values())))
            for rank in failed.keys() - noted:
                noted.add(rank)
                if None in states or 0 in states:
                    _say(rank, failed[rank] or 0)
            if None not in states:
                return 0 if 0 in states else shell_status(next(iter(failed.values())))
            time.sleep(_POLL_SECONDS)
    finally:
        end(ranks)


def end(ranks: Ranks) -> None:
    """Ends every rank that still runs: asks first, then insists."""
    for process in ranks:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _say(rank: int, state: int) -> None:
    ended = status_text(shell_status(state))
    print(
        f"ddltrace: rank {rank} ended with {ended}; the others continue",
        file=sys.stderr,
        flush=True,
    )
