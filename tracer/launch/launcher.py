"""Runs a job with the tracer on its ranks' import path, and finalizes the trace."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.config import CaptureConfig, read_reports
from ddltrace.tracer.errors import UnwritableError, UsageError
from ddltrace.tracer.exit_status import shell_status
from ddltrace.tracer.launch.command_start import explain_no_start
from ddltrace.tracer.launch.group_signals import GroupSignals, group_signals, shares_group
from ddltrace.tracer.nccl.job_rings import shorten_rings
from ddltrace.tracer.output_directory import creation_error, is_taken, make_room

if TYPE_CHECKING:
    from ddltrace.tracer.launch.rank_ends import End
    from ddltrace.tracer.trace.run_info import RunInfo

_OF_FAULTS: Final = ("ILL", "TRAP", "BUS", "FPE", "SEGV", "SYS", "EMT", "PIPE", "XFSZ")
_OF_TIMERS: Final = ("VTALRM", "PROF")
_OF_JOB_CONTROL: Final = ("TSTP", "TTIN", "TTOU", "CONT", "WINCH", "URG", "INFO")
_FORWARDED: Final = signal.valid_signals() - {
    getattr(signal, f"SIG{name}", 0)
    for name in ("KILL", "STOP", "CHLD", *_OF_FAULTS, *_OF_TIMERS, *_OF_JOB_CONTROL)
}
"""Signals that others send to end or to notify a process, such as a batch system at a limit of
time, of processor time, or at a failure of power."""

_BOOTSTRAP: Final = Path(__file__).resolve().parents[1] / "bootstrap"
_OF_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_SENT_BY_KERNEL: Final = 0x80  # SI_KERNEL


@dataclass(frozen=True)
class JobResult:
    """How a traced job ended.

    Attributes:
        exit_status: The job's own status; 128 + n if signal n killed it.
        num_ranks: Number of rank processes that recorded.
        notes: What is missing from the trace, one line each.
        reasons: Why processes of the job could not record, one line each.
        harmed: Whether the trace was lost, or no process could record, for a reason outside the
            job, such as a full disk.
    """

    exit_status: int
    num_ranks: int
    notes: tuple[str, ...]
    reasons: tuple[str, ...]
    harmed: bool = False


def keep_owner_access() -> int:
    """Lets this process, not its job, use the files that it creates whatever the umask.

    Returns:
        The umask so far, which is the job's.
    """
    umask = os.umask(0o077)
    os.umask(umask & ~stat.S_IRWXU)
    return umask


def prepare_directory(directory: Path, *, force: bool) -> None:
    """Creates a trace directory with an initial `RUN_FILE` and no other files of a trace.

    Args:
        directory: The trace directory.
        force: Whether to replace a trace that is there. One of a job that recorded nothing is
            replaced anyway.

    Raises:
        UsageError: The directory exists and must not, or cannot, be replaced.
        UnwritableError: The file system refuses.
    """
    from ddltrace.tracer.trace.liveness import pid_namespace
    from ddltrace.tracer.trace.removal import holds_no_events, is_trace, remove_trace
    from ddltrace.tracer.trace.run_files import write_run
    from ddltrace.tracer.trace.run_info import RunInfo
    from ddltrace.tracer.trace.trace_files import RUN_FILE

    force = force or holds_no_events(directory)
    make_room(directory, "trace", is_trace, remove_trace, force=force)
    # When two launchers start at the same time, only one of them can create this file; the other
    # checks again. RUN_FILE cannot serve as the lock: readers must never see it empty.
    claim = directory / ".claim"
    try:
        claim.open("x").close()
        try:
            if (directory / RUN_FILE).exists():
                raise is_taken(directory)
            write_run(
                directory,
                RunInfo(
                    host=os.uname().nodename,
                    launcher_pid=os.getpid(),
                    pid_namespace=pid_namespace(),
                ),
            )
        finally:
            claim.unlink()
    except FileExistsError:
        raise is_taken(directory) from None
    except OSError as error:
        raise creation_error(directory, error) from error


def run_job(
    command: Sequence[str],
    config: CaptureConfig,
    umask: int,
    labels: dict[str, object] | None = None,
    beside: AbstractContextManager[None] | None = None,
    *,
    recorded: Sequence[str],
) -> JobResult:
    """Runs a command with its ranks traced.

    Args:
        command: The job's command line.
        config: How to record; its directory was created by `prepare_directory`.
        umask: The job's umask.
        labels: Entries to add to the run's labels.
        beside: Entered when the job's process has been forked, and left at its end.
        recorded: The command line as it is recorded.

    Returns:
        How the job ended. The trace is finalized.

    Raises:
        UsageError: The command cannot be started.
        UnwritableError: The directory is not writable; the job was not started.
    """
    from importlib.metadata import version

    from ddltrace.tracer.trace.finalize import finalize
    from ddltrace.tracer.trace.json_files import reserve_space
    from ddltrace.tracer.trace.liveness import pid_namespace
    from ddltrace.tracer.trace.run_files import remove_unrecorded, write_run
    from ddltrace.tracer.trace.run_info import RunInfo
    from ddltrace.tracer.trace.trace_files import RUN_FILE

    _tell_outer_launcher(config.directory)
    run = RunInfo(
        command=list(recorded),
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
        raise UnwritableError(f"{config.directory} is not writable: {error.strerror}") from error
    reserve_space(config.directory / RUN_FILE)
    reasons: list[str] = []
    ends: dict[str, End] = {}
    with _reports_directory() as reports:
        try:
            environment = environment_of_job(replace(config, reports_directory=reports))
            watching = _both(_watching(config.directory, ends), beside)
            run.exit_status = _supervise(command, environment, umask, watching)
        except UsageError:
            remove_unrecorded(config.directory)
            raise
        with contextlib.suppress(OSError):
            reasons = read_reports(Path(reports)) if reports else []
    run.ended_unix_ns = time.time_ns()
    status = run.exit_status
    try:
        run = finalize(config.directory, run, ends)
        if run.status != "running":
            shorten_rings(config.directory)
        reasons += read_reports(config.directory)
    except Exception as error:  # noqa: BLE001 - the status is the job's, whatever happened
        if not config.directory.exists():
            note = f"{config.directory} was deleted while the job ran"
            return JobResult(status, 0, (note,), (note,), harmed=True)
        note = f"the trace could not be finalized ({error!s:.300}); the recorded part can be read"
        _note_in_place(config.directory, run, note)
        return JobResult(status, len(run.ranks), (note,), (note,), harmed=True)
    except KeyboardInterrupt:
        # The streams of the ranks are readable as they are; only the compact files are missing.
        note = "interrupted before the trace was finalized; it can be read as it is"
        _note_in_place(config.directory, run, note)
        return JobResult(status, len(run.ranks), (note,), (note,))
    num_ranks = len({(info.role, info.rank) for info in run.ranks})
    if run.status == "running" and num_ranks == 0:
        reasons += run.notes
    return JobResult(status, num_ranks, tuple(run.notes), tuple(reasons), harmed=bool(reasons))


def _tell_outer_launcher(directory: Path) -> None:
    """Reports to a launcher of which this one is a part of the job that it will record nothing."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the variable is damaged
        outer = CaptureConfig.from_environment()
        if outer is not None:
            outer.report(f"the command is itself a ddltrace run, which records into {directory}")


def _note_in_place(directory: Path, run: RunInfo, note: str) -> None:
    """Notes in ``run.json`` why it does not contain the ranks' records, which stay beside it."""
    from ddltrace.tracer.trace.run_files import overwrite_run

    with contextlib.suppress(OSError):
        overwrite_run(
            directory,
            replace(run, status="running", launcher_pid=None, ranks=[], notes=[note]),
        )


@contextlib.contextmanager
def _both(
    first: AbstractContextManager[None], second: AbstractContextManager[None] | None
) -> Iterator[None]:
    with first, second or contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _watching(directory: Path, ends: dict[str, End]) -> Iterator[None]:
    """Watches the ranks of a trace; the job runs on if watching is not possible.

    Args:
        directory: The trace directory.
        ends: Receives the end of each process, by its segment.
    """
    from ddltrace.tracer.launch.rank_ends import RankEnds

    watch = None
    with contextlib.suppress(OSError, RuntimeError):  # out of file descriptors or threads
        watch = RankEnds(directory)
        watch.start()
    try:
        yield
    finally:
        if watch is not None:
            watch.stop()
            ends.update(watch.ends)


@contextlib.contextmanager
def _reports_directory() -> Iterator[str]:
    """Creates a directory in which processes of other users can report why they do not record.

    Yields:
        Its path; empty if it cannot be created.
    """
    path = ""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            path = tempfile.mkdtemp(prefix="ddltrace-")
            os.chmod(path, 0o1733)
    try:
        yield path
    finally:
        if path:
            shutil.rmtree(path, ignore_errors=True)


def run_untraced(command: Sequence[str], umask: int) -> int:
    """Runs a command without tracing it.

    Args:
        command: The job's command line.
        umask: The job's umask.

    Returns:
        Its exit status; 128 + n if signal n killed it.

    Raises:
        UsageError: The command cannot be started.
    """
    return _supervise(command, dict(os.environ), umask)


def environment_of_job(config: CaptureConfig) -> dict[str, str]:
    """Environment variables under which a job and all its child processes are traced."""
    environment = {**os.environ, **config.to_environment()}
    inherited = environment.get("PYTHONPATH")
    paths = [str(_BOOTSTRAP), *([inherited] if inherited else [])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _supervise(
    command: Sequence[str],
    environment: dict[str, str],
    umask: int,
    watching: AbstractContextManager[None] | None = None,
) -> int:
    """Runs the command to its end and forwards signals to it.

    `watching` must start its threads itself: after the fork, with the signals blocked.

    The child stays in the launcher's process group and so keeps the terminal. A Ctrl-C, and each
    other signal to the group, reaches it directly; only signals that were sent to the launcher
    alone are forwarded.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    try:
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                preexec_fn=unblock,  # noqa: PLW1509
                umask=umask,
            )
        except OSError as error:
            raise UsageError(explain_no_start(command, error)) from error
        with watching or contextlib.nullcontext(), group_signals() as to_group:
            status = _wait(child, to_group)
        _forget_pending()
    finally:
        unblock()
    return shell_status(status)


def _wait(child: subprocess.Popen[bytes], to_group: GroupSignals) -> int:
    if not hasattr(signal, "sigtimedwait"):  # macOS
        return _wait_with_handlers(child)
    while (status := child.poll()) is None:
        received = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 1.0)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        if _has_missed(child, received, to_group):
            child.send_signal(received.si_signo)
            if (received.si_signo, received.si_code) == (signal.SIGHUP, _SENT_BY_KERNEL):
                child.send_signal(signal.SIGCONT)  # the kernel sends both
    return status


def _has_missed(
    child: subprocess.Popen[bytes], received: signal.struct_siginfo, to_group: GroupSignals
) -> bool:
    """Whether a signal that the launcher has received has not reached the job."""
    number = received.si_signo
    if received.si_code != _SENT_BY_KERNEL:
        return not (shares_group(child.pid) and to_group.includes(number))
    if number == signal.SIGXCPU:
        return False  # the launcher's own limit of processor time; the job has one of its own
    is_leader = os.getsid(0) == os.getpid()
    if number in _OF_TERMINAL and not (number == signal.SIGHUP and is_leader):
        to_group.forget()
        return False
    # The terminal was closed, of which the kernel tells the leader of the session alone; or a
    # timer has run out that was set before the launcher was started.
    return True


def _forget_pending() -> None:
    """Discards signals that were meant for the job, so that the trace is still finalized."""
    if hasattr(signal, "sigtimedwait"):
        while signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 0) is not None:
            pass


def _wait_with_handlers(child: subprocess.Popen[bytes]) -> int:
    """For platforms that hide the sender of a signal: the job may receive a Ctrl-C twice."""
    for number in _FORWARDED:
        signal.signal(number, lambda n, _: child.send_signal(n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    return child.wait()
