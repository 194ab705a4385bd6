"""Arms a running job that was started without ddltrace.

Python 3.14 and later run a script in another Python process, on its main thread and between two of
its instructions (`sys.remote_exec`). The script here arms the process like `ddltrace.arm` and
writes the outcome beside itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.connections.requests import ask
from ddltrace.tracer.errors import DdltraceError, MissingCapabilityError, UsageError
from ddltrace.tracer.owner_access import let_owner_use
from ddltrace.tracer.switch_orders import sockets_of_process

TIMEOUT_S: Final = 60.0
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05

_OF_A_RANK: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Environment variables that number the ranks, each set by some launchers."""

_OF_A_JOB: Final = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),
    *("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Environment variables that have the same values in all ranks of a job."""

_SCRIPT: Final = """\
def attach():
    import importlib, json, os, sys

    interrupt = None
    try:
        importlib.invalidate_caches()
        from ddltrace.tracer.capture.attached import arm_attached

        outcome = arm_attached(*{arguments!r})
    except ImportError as error:
        outcome = {{"error": f"{{error}}: run `{{sys.executable}} -m pip install ddltrace`"}}
    except BaseException as error:
        outcome = {{"error": f"{{type(error).__name__}}: {{error}}"}}
        interrupt = None if isinstance(error, Exception) else error
    try:
        with open({outcome!r} + ".part", "w") as file:
            json.dump(outcome, file)
        os.rename({outcome!r} + ".part", {outcome!r})
    except OSError:
        pass
    if interrupt is not None:
        raise interrupt


attach()
"""

_LATER: Final = """\
def attach():
    import os

    try:
        os.unlink({script!r})
        os.rmdir(os.path.dirname({script!r}))
    except OSError:
        pass


attach()
"""

_LATE: Final = (
    "its main thread has not come back to the interpreter in {:g} s, as in a collective that waits "
    "for another rank: try again"
)

Deliver = Callable[[int, Path], None]
"""Makes a process run a script on its main thread; raises `OSError` or `RuntimeError`."""


@dataclass(frozen=True)
class Outcome:
    """What has become of a process.

    Attributes:
        pid: The process.
        rank: Its rank; None if it has not joined a process group.
        world_size: Number of ranks of its job; None likewise.
        error: Why it is not armed; None if it is.
    """

    pid: int
    rank: int | None = None
    world_size: int | None = None
    error: str | None = None


def attach_to(
    processes: Iterable[int], directory: Path, *, deliver: Deliver, timeout_s: float = TIMEOUT_S
) -> list[Outcome]:
    """Arms processes of this user.

    Args:
        processes: Their ids.
        directory: The trace directory; created if it is missing.
        deliver: Makes a process run a script.
        timeout_s: Longest time until the processes have run it.

    Returns:
        What has become of each of them, by process id.

    Raises:
        UsageError: The directory holds other files.
        OSError: There is no place for the script.
    """
    config = CaptureConfig.in_code(directory, "layer")
    assert config is not None
    folder = Path(tempfile.mkdtemp(prefix="ddltrace-attach-"))
    let_owner_use(folder)
    outcomes = []
    waiting: set[int] = set()
    try:
        for rank in processes:
            script = folder / f"{rank}.py"
            arguments = (str(config.directory), str(folder), metadata.version("ddltrace"))
            text = _SCRIPT.format(arguments=arguments, outcome=str(folder / f"{rank}.json"))
            script.write_text(text, encoding="utf-8")
            try:
                _check_version(rank)
                deliver(rank, script)
            except (OSError, RuntimeError, ValueError, DdltraceError, psutil.Error) as error:
                outcomes.append(Outcome(rank, error=_reason(error)))
            else:
                waiting.add(rank)
        outcomes += _outcomes(folder, waiting, timeout_s)
    finally:
        _clean_up(folder, waiting)
    return sorted(outcomes, key=lambda outcome: outcome.pid)


def _outcomes(folder: Path, waiting: set[int], timeout_s: float) -> Iterator[Outcome]:
    """Waits until the processes have run the script; those that have not remain in `waiting`."""
    deadline = time.monotonic() + timeout_s
    while waiting:
        is_late = time.monotonic() > deadline
        for rank in sorted(waiting):
            path = folder / f"{rank}.json"
            if path.exists():
                waiting.remove(rank)
                yield Outcome(rank, **json.loads(path.read_text(encoding="utf-8")))
            elif _has_ended(rank):
                waiting.remove(rank)
                yield Outcome(rank, error="it has ended")
            elif is_late:
                yield Outcome(rank, error=_LATE.format(timeout_s))
        if is_late:
            return
        time.sleep(_POLL_S)


def _clean_up(folder: Path, waiting: Iterable[int]) -> None:
    """Removes the scripts; a process that still has to run one will only remove it.

    If its script were missing, Python would print an error into the job's output.
    """
    for rank in waiting:
        script = folder / f"{rank}.py"
        with contextlib.suppress(OSError):
            later = folder / "later"
            later.write_text(_LATER.format(script=str(script)), encoding="utf-8")
            later.replace(script)
    names = {f"{rank}.py" for rank in waiting}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()
        if not names:
            folder.rmdir()


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _check_version(pid: int) -> None:
    """Checks that a process runs this version of Python, if the name of its program tells.

    Raises:
        MissingCapabilityError: It does not.
    """
    name = Path(psutil.Process(pid).exe()).name
    found = re.match(r"python(\d+)\.(\d+)", name)
    own = sys.version_info[:2]
    if found and (int(found[1]), int(found[2])) != own:
        raise MissingCapabilityError(
            f"it runs {found[0]}, and this is Python {own[0]}.{own[1]}: both have to be the same, "
            "3.14 or later; otherwise start the job with ddltrace run --off -- COMMAND"
        )


def _reason(error: Exception) -> str:
    """Why the script could not be delivered."""
    if isinstance(error, DdltraceError):
        return str(error)
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if isinstance(error, PermissionError):
        return f"{text} (it takes CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0)"
    return text


def directory_of(pid: int) -> Path | None:
    """The trace directory of a process that takes orders; None if it takes none.

    Raises:
        DdltraceError: It does not answer.
    """
    for path in sockets_of_process(pid):
        try:
            return Path(ask(path, {"do": "state"}, _ANSWER_TIMEOUT_S)["directory"])
        except (OSError, KeyError) as error:
            raise DdltraceError(f"process {pid} is armed but does not answer: {error}") from error
    return None


class _Place(NamedTuple):
    """What the environment of a process tells of its place in a job.

    Attributes:
        job: Values that all ranks of the job share.
        rank: The rank.
        is_local: Whether it is numbered on its host, too. If a launcher has a rank, it is that of
            its pod, and the ranks below it have others.
    """

    job: tuple[str | None, ...]
    rank: str
    is_local: bool


def ranks_of(pid: int) -> list[int]:
    """The ranks of a job on this host.

    Args:
        pid: Its launcher, a rank, or a process below one.

    Returns:
        Their process ids: of each rank, the first Python process that has its variables in its
        environment. The process itself if no variables tell.

    Raises:
        UsageError: There is no such process that this user may arm.
    """
    process = _checked(pid)
    of_job = {place[::2] for place in _places_below(process)}
    if any(is_local for _, is_local in of_job):
        of_job = {(job, is_local) for job, is_local in of_job if is_local}
    if len(of_job) > 1:
        raise UsageError(f"several jobs are below process {pid}: name one of their ranks")
    found: dict[int, _Place] = {}
    for member in psutil.process_iter() if of_job else ():
        place = _place_of(member)
        if place is not None and place[::2] in of_job and _can_run_script(member):
            found[member.pid] = place
    ranks = [rank for rank, place in found.items() if not _is_below(rank, place, found)]
    if not ranks and not _can_run_script(process):
        raise UsageError(f"process {pid} is not Python, and no rank of a job was found below it")
    return ranks or [pid]


def _checked(pid: int) -> psutil.Process:
    """A process of this user that runs where this one does.

    Raises:
        UsageError: It is none.
    """
    try:
        process = psutil.Process(pid)
        owner, user = process.uids().effective, process.username()
    except psutil.Error as error:
        raise UsageError(f"there is no process {pid}") from error
    if _has_ended(pid):
        raise UsageError(f"process {pid} has ended")
    if owner != os.geteuid():
        raise UsageError(f"process {pid} belongs to {user}: only that user can arm it")
    if not _sees_our_files(pid):
        raise UsageError(f"process {pid} runs in a container: call ddltrace attach there")
    return process


def _sees_our_files(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return not Path("/proc/self").exists()


def _places_below(process: psutil.Process) -> Iterator[_Place]:
    """The places in jobs of a process and those below it; only its own if it is surely a rank."""
    own = _place_of(process)
    if own is not None:
        yield own
    if own is not None and own.is_local:
        return
    for member in process.children(recursive=True):
        place = _place_of(member)
        if place is not None:
            yield place


def _place_of(process: psutil.Process) -> _Place | None:
    try:
        variables = process.environ()
    except psutil.Error:
        return None  # of another user, or it has ended
    rank = next((variables[name] for name in _OF_A_RANK if name in variables), None)
    job = tuple(variables.get(name) for name in _OF_A_JOB)
    if rank is None or not any(job):
        return None
    return _Place(job, rank, "LOCAL_RANK" in variables)


def _can_run_script(process: psutil.Process) -> bool:
    """Whether a process is Python, of this user, and sees the script."""
    try:
        is_python = Path(process.exe()).name.startswith("python")
        return (
            is_python and process.uids().effective == os.geteuid() and _sees_our_files(process.pid)
        )
    except psutil.Error:
        return False


def _is_below(pid: int, place: _Place, found: Mapping[int, _Place]) -> bool:
    """Whether a process was started by the rank that it is in."""
    try:
        return any(found.get(parent.pid) == place for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return True
