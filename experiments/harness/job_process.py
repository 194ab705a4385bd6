"""Runs one job with a log, a time limit and forwarded signals."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddltrace.experiments.parent_process import end_with_parent
from ddltrace.tracer.errors import DdltraceError
from ddltrace.tracer.exit_status import shell_status

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS: Final = 0.25
_LAST_LINES: Final = 3
_SHOWN: Final = 300
_GRACE_SECONDS: Final = 20.0
"""Time that a job gets to write its trace between SIGTERM and SIGKILL, in seconds."""


class Interrupted(DdltraceError):
    """A signal ended the experiment, after its running job was ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        status: Its exit status as shells give it.
        timed_out: Whether it was ended because it exceeded the time limit.
        wall_s: Seconds from its start to its end.
    """

    status: int
    timed_out: bool
    wall_s: float


def ranks_launcher(ranks: int, hosts: int | None = None, bandwidth: str | None = None) -> list[str]:
    """The start of a command that runs Python on every rank; Python's arguments follow.

    Args:
        ranks: Number of ranks, on this machine's own network.
        hosts: Hosts of an emulated network, one rank each; None for this machine's own.
        bandwidth: Rate of each of its links.
    """
    launch = [sys.executable, "-m"]
    if hosts is None:
        return [*launch, "ddltrace.experiments.harness.local_ranks", "--ranks", str(ranks), "--"]
    launch += ["ddltrace.experiments.network.launch", "--hosts", str(hosts)]
    return [*launch, "--bandwidth", str(bandwidth), "--", sys.executable]


def last_lines(log: Path) -> str:
    """The end of a log in one line, without the command line that begins it."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[1:]
    return " / ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])[-_SHOWN:]


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
        command: The command to run.
        log: File for the command line and the output.
        timeout_s: Time limit in seconds.
        environment: Additional environment variables.
        observe: Called a few times per second while the job runs.

    Raises:
        Interrupted: A signal came.
    """
    begin = time.monotonic()
    with log.open("wb") as output, _forwarding_signals() as signals:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
            # A Ctrl-C must reach the job only once, through this process.
            start_new_session=True,
            # A job must not outlive an experiment that is killed.
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no threads
        )
        signals.forward_to(job)
        timed_out = not _wait(job, begin + timeout_s, observe)
        if timed_out and not signals.received:
            _end(job)
        status = job.wait()
    if signals.received:
        raise Interrupted(signals.received[0])
    return JobEnd(shell_status(status), timed_out, time.monotonic() - begin)


class Interruptible:
    """Raises `Interrupted` for a signal that would otherwise end this process silently."""

    def __init__(self) -> None:
        self._received: list[int] = []

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Handles the signals while the context is entered."""
        with _handling(self):
            yield

    def check(self) -> None:
        """Raises what a signal raised before.

        Where Python ignores exceptions (in finalizers and callbacks of weak references, of which
        imports have many), the one of the handler is lost.

        Raises:
            Interrupted: A signal came.
        """
        if self._received:
            raise Interrupted(self._received[0])

    def __call__(self, number: int, frame: Any) -> None:
        """Handles a signal."""
        self._received.append(number)
        raise Interrupted(number)


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


class _Signals:
    """The received signals, and the job to which they are forwarded."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._job: subprocess.Popen[bytes] | None = None

    def forward_to(self, job: subprocess.Popen[bytes]) -> None:
        """Forwards signals to a job from now on, and those received before."""
        self._job = job
        for number in self.received:
            self._send(number)

    def __call__(self, number: int, frame: Any) -> None:
        self.received.append(number)
        self._send(number)

    def _send(self, number: int) -> None:
        if self._job is not None:
            with contextlib.suppress(ProcessLookupError):
                self._job.send_signal(number)


@contextlib.contextmanager
def _forwarding_signals() -> Iterator[_Signals]:
    signals = _Signals()
    with _handling(signals):
        yield signals


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    former = {number: signal.signal(number, handler) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, earlier in former.items():
            signal.signal(number, earlier)


_STAT: Final = Path("/proc/stat")
_IDLE: Final = (3, 4)
"""Fields of the kernel's line ``cpu`` of idle cores: with nothing to do, or waiting for a disk."""
_GUEST: Final = 8
"""From this field on, time is counted twice: guests' time is in the user's."""


class OtherCores:
    """Compares the machine's processor time with that of this process and its ended children."""

    def __init__(self) -> None:
        """Begins to measure."""
        self._busy, self._own = _busy_seconds(), _own_seconds()
        self._start = time.monotonic()

    def mean(self) -> float | None:
        """Cores that were busy with other work since the start, in the mean.

        Returns:
            At least 0; None where the kernel does not say how busy it was.
        """
        busy, wall = _busy_seconds(), time.monotonic() - self._start
        if self._busy is None or busy is None or wall <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_seconds() - self._own)) / wall)


def _busy_seconds() -> float | None:
    """Seconds that all cores together have worked since the machine's start."""
    try:
        fields = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    busy = sum(field for n, field in enumerate(fields[:_GUEST]) if n not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Seconds that this process and its ended descendants have worked."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
