"""Runs a job with the tracer in reach of its ranks, and finishes its trace whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.config import CaptureConfig, words_in
from ddltrace.tracer.errors import UnwritableError, UsageError
from ddltrace.tracer.exit_status import shell_status
from ddltrace.tracer.output_directory import cannot_be_made, is_taken, make_empty

if TYPE_CHECKING:
    from ddltrace.tracer.launch.rank_ends import End

_FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    # Batch systems announce the end of a job's time by these.
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_BOOTSTRAP: Final = Path(__file__).resolve().parents[1] / "bootstrap"
_SENT_BY_KERNEL: Final = 0x80  # SI_KERNEL: a Ctrl-C reaches the whole foreground group by itself


@dataclass(frozen=True)
class JobResult:
    """How a traced job ended.

    Attributes:
        exit_status: The job's own status, 128 + n when killed by signal n.
        num_ranks: Rank processes that recorded.
        notes: What is missing from the trace, each one line.
        reasons: Why processes below the launcher could not record, each one line.
        harmed: Whether the trace was lost, or no process could record, through no fault of the
            job's.
    """

    exit_status: int
    num_ranks: int
    notes: tuple[str, ...]
    reasons: tuple[str, ...]
    harmed: bool = False


def prepare_directory(directory: Path, *, force: bool) -> None:
    """Makes a trace directory that holds nothing but a `RUN_FILE` that says nothing yet.

    Args:
        directory: Where the trace goes.
        force: Whether a trace that stands there may be deleted.

    Raises:
        UsageError: Something stands there and must not, or cannot, be replaced.
        UnwritableError: The disk does not let us.
    """
    from ddltrace.tracer.trace.run_files import write_run
    from ddltrace.tracer.trace.run_info import RunInfo
    from ddltrace.tracer.trace.trace_files import RUN_FILE

    make_empty(directory, marker=RUN_FILE, kind="trace", force=force)
    # Of two launchers that start at once only one can make this file, and the other looks once
    # more. The run's own file cannot serve: whoever reads the trace must never see it empty.
    claim = directory / ".claim"
    try:
        claim.open("x").close()
        try:
            if (directory / RUN_FILE).exists():
                raise is_taken(directory)
            write_run(directory, RunInfo())
        finally:
            claim.unlink()
    except FileExistsError:
        raise is_taken(directory) from None
    except OSError as error:
        raise cannot_be_made(directory, error) from error


def run_job(
    command: Sequence[str], config: CaptureConfig, labels: dict[str, object] | None = None
) -> JobResult:
    """Runs a command with its ranks traced.

    Args:
        command: The job's command line.
        config: How to record; its directory is one that `prepare_directory` has made.
        labels: What the trace is to say of itself.

    Returns:
        How the job ended; its trace is final.

    Raises:
        UsageError: The command cannot be started.
        UnwritableError: Nothing can be written to the directory; the job was not started.
    """
    from importlib.metadata import version

    from ddltrace.tracer.trace.finalize import finalize
    from ddltrace.tracer.trace.json_files import reserve_space
    from ddltrace.tracer.trace.liveness import pid_namespace
    from ddltrace.tracer.trace.run_files import remove_unrecorded, write_run
    from ddltrace.tracer.trace.run_info import RunInfo
    from ddltrace.tracer.trace.trace_files import RUN_FILE

    run = RunInfo(
        command=list(command),
        level=config.level,
        version=version("ddltrace"),
        host=os.uname().nodename,
        created_unix_ns=time.time_ns(),
        launcher_pid=os.getpid(),
        pid_namespace=pid_namespace(),
        labels=dict(labels or {}),
    )
    try:
        write_run(config.directory, run)
    except OSError as error:
        raise UnwritableError(
            f"{config.directory} cannot be written to: {error.strerror}"
        ) from error
    reserve_space(config.directory / RUN_FILE)
    reasons: list[str] = []
    ends: dict[str, End] = {}
    with _place_for_words() as words:
        try:
            environment = environment_of_job(replace(config, words=words))
            run.exit_status = _supervise(command, environment, _watching(config.directory, ends))
        except UsageError:
            remove_unrecorded(config.directory)
            raise
        with contextlib.suppress(OSError):
            reasons = words_in(Path(words)) if words else []
    run.ended_unix_ns = time.time_ns()
    status = run.exit_status
    try:
        run = finalize(config.directory, run, ends)
        reasons += words_in(config.directory)
    except Exception as error:  # noqa: BLE001 - the status is the job's, whatever happened
        if not config.directory.exists():
            note = f"{config.directory} vanished while the job ran"
            return JobResult(status, 0, (note,), (note,), harmed=True)
        note = f"the trace could not be finished ({error}); what there is of it can be read"
        return JobResult(status, len(run.ranks), (note,), (note,), harmed=True)
    except KeyboardInterrupt:
        # What a rank wrote is readable at any moment; only the compact files are missing.
        note = "interrupted before the trace was finished; it can be read as it is"
        return JobResult(status, len(run.ranks), (note,), (note,))
    num_ranks = len({info.rank for info in run.ranks})
    return JobResult(status, num_ranks, tuple(run.notes), tuple(reasons), harmed=bool(reasons))


@contextlib.contextmanager
def _watching(directory: Path, ends: dict[str, End]) -> Iterator[None]:
    """Watches the ranks that record into a directory; the job goes on if that cannot be.

    Args:
        directory: The trace's.
        ends: Gets the end of each process, by its segment.
    """
    from ddltrace.tracer.launch.rank_ends import RankEnds

    watch = None
    with contextlib.suppress(OSError, RuntimeError):  # there are no more descriptors or threads
        watch = RankEnds(directory)
        watch.start()
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()
            ends.update(watch.ends)


@contextlib.contextmanager
def _place_for_words() -> Iterator[str]:
    """A directory for words of processes of other users, who may not write to the trace's.

    Yields:
        It; empty if the job cannot have any, or there is no room.
    """
    place = ""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            place = tempfile.mkdtemp(prefix="ddltrace-")
            os.chmod(place, 0o1733)
    try:
        yield place
    finally:
        if place:
            shutil.rmtree(place, ignore_errors=True)


def run_untraced(command: Sequence[str]) -> int:
    """Runs a command as it is.

    Returns:
        Its status, 128 + n when killed by signal n.

    Raises:
        UsageError: The command cannot be started.
    """
    return _supervise(command, dict(os.environ))


def environment_of_job(config: CaptureConfig) -> dict[str, str]:
    """The environment in which a job and all processes below it are traced."""
    environment = {**os.environ, **config.to_environment()}
    inherited = environment.get("PYTHONPATH")
    paths = [str(_BOOTSTRAP), *([inherited] if inherited else [])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _supervise(
    command: Sequence[str],
    environment: dict[str, str],
    watching: AbstractContextManager[None] | None = None,
) -> int:
    """Runs the command to its end, passing on signals.

    Threads are to be started by `watching`: after the fork, and with the signals blocked.

    The child stays in the launcher's process group, so that it has the terminal: a Ctrl-C then
    reaches it without us, and only signals that somebody sent to us alone are forwarded.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    try:
        try:
            child = subprocess.Popen(command, env=environment, preexec_fn=unblock)  # noqa: PLW1509
        except FileNotFoundError as error:
            raise UsageError(f"command not found: {command[0]}") from error
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
        with watching or contextlib.nullcontext():
            status = _wait(child)
        _forget_pending()
    finally:
        unblock()
    return shell_status(status)


def _wait(child: subprocess.Popen[bytes]) -> int:
    if not hasattr(signal, "sigtimedwait"):  # macOS
        return _wait_with_handlers(child)
    while (status := child.poll()) is None:
        received = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 1.0)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        if received.si_code != _SENT_BY_KERNEL:
            child.send_signal(received.si_signo)
    return status


def _forget_pending() -> None:
    """Drops signals that were meant for the job, which has ended: the trace is to be finished."""
    if hasattr(signal, "sigtimedwait"):
        while signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 0) is not None:
            pass


def _wait_with_handlers(child: subprocess.Popen[bytes]) -> int:
    """Without the sender of a signal in sight: a Ctrl-C may reach the job twice."""
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: child.send_signal(n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    return child.wait()
