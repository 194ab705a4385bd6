"""Runs one job to its end: into a log, within a time limit, with signals passed on to it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.exit_status import shell_status

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS: Final = 0.25
_GRACE_SECONDS: Final = 20.0
"""What a job that is asked to end gets to write its trace, before it is killed."""


class Interrupted(DdltraceError):
    """A signal ended the experiment; its running job was ended before."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        status: Its exit status as shells give it.
        timed_out: Whether it was ended because it took too long.
        wall_s: Seconds from its start to its end.
    """

    status: int
    timed_out: bool
    wall_s: float


def run_job(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str],
    observe: Callable[[], None] = lambda: None,
) -> JobEnd:
    """Runs a command into a log and waits for its end.

    A signal to this process is passed on to the job. A job that exceeds the time limit gets
    SIGTERM and, if it does not end, SIGKILL, with all processes of its session.

    Args:
        command: What to run.
        log: Where its output goes, after the command itself.
        timeout_s: Time limit in seconds.
        environment: Variables that are added to this process's.
        observe: Called a few times per second while the job runs.

    Raises:
        Interrupted: A signal came.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            # A Ctrl-C must reach the job once, by way of us.
            start_new_session=True,
        )
        with _forwarding_signals(job) as received:
            timed_out = not _wait(job, begin + timeout_s, observe)
            if timed_out and not received:
                _end(job)
            status = job.wait()
    if received:
        raise Interrupted(received[0])
    return JobEnd(shell_status(status), timed_out, time.monotonic() - begin)


def _wait(job: subprocess.Popen[bytes], deadline: float, observe: Callable[[], None]) -> bool:
    """Waits for the end of a job; False if it still runs at the deadline."""
    while True:
        left = deadline - time.monotonic()
        try:
            job.wait(max(0.0, min(_POLL_SECONDS, left)))
        except subprocess.TimeoutExpired:
            if left <= 0:
                return False
            observe()
        else:
            return True


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@contextlib.contextmanager
def _forwarding_signals(job: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    received: list[int] = []

    def forward(number: int, frame: Any) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(number)

    former = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
