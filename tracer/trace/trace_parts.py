"""Reads and merges the trace of one job that several launchers wrote to separate directories.

Where every node, or every task of ``mpirun`` or ``srun``, starts its own ``ddltrace run``, each
launcher writes a trace of its own, a *part*. Launchers that share a directory write below it::

    trace/run.json              says that the trace is in parts
    trace/part-00000/run.json   a trace like any other, of the ranks of one launcher
    trace/part-00001/run.json

so that launchers neither wait for nor overwrite each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.output_directory import creation_error, make_room
from ddltrace.tracer.storage.location import PART_PREFIX
from ddltrace.tracer.storage.plain_files import copy_plain
from ddltrace.tracer.trace.finalize import finalize_ranks
from ddltrace.tracer.trace.removal import holds_no_events, is_trace, remove_trace
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import PARTS_LABEL, RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import (
    RING_PATTERN,
    RUN_FILE,
    counters_path,
    event_path,
    joined_directory,
    left_out,
    parts_of,
)

_CLOCKS_DIFFER_S: Final = 60
"""Wall clocks of hosts may differ by so much; launchers of one job run at the same time."""

_TORCHRUN_NAMES: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")

TASK_VARIABLES: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PALS_SIZE", "PALS_RANKID"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    # After those of mpirun: Slurm may have started its helpers, one for each node.
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("WORLD_SIZE", "RANK"),
)
"""Environment variables of launchers for the number of tasks and the index of this task."""

JOB_VARIABLES: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE", "PET_RDZV_ID")
"""Environment variables of launchers for the name of the job."""


@dataclass(frozen=True)
class Part:
    """Identifies one of several launchers of a job.

    Attributes:
        name: Name of the launcher, unique in the job.
        job: Name of the job, equal for all its launchers; None if there is none.
    """

    name: str
    job: str | None


def part_of_job(command: Sequence[str], environment: dict[str, str]) -> Part | None:
    """Determines whether this launcher is one of several of its job.

    Args:
        command: The command that the launcher runs.
        environment: The launcher's environment variables.

    Returns:
        The launcher's part; None if it appears to be the only launcher.
    """
    job = next((environment[name] for name in JOB_VARIABLES if environment.get(name)), None)
    for size, number in TASK_VARIABLES:
        tasks, task = environment.get(size, ""), environment.get(number, "")
        if tasks.isdigit() and task.isdigit() and int(tasks) > 1:
            return Part(f"{int(task):05d}", job)
    options = _launch_options(command)
    if options is None:
        return None
    nodes = options.get("nnodes") or options.get("num-machines") or environment.get("PET_NNODES")
    most = (nodes or "1").rpartition(":")[2]
    if not most.isdigit() or int(most) < 2:
        return None
    job = options.get("rdzv-id") or job
    node = options.get("node-rank") or options.get("machine-rank")
    node = node or environment.get("PET_NODE_RANK") or environment.get("SLURM_NODEID", "")
    if node.isdigit():
        return Part(f"{int(node):05d}", job)
    return Part(part_name(f"{os.uname().nodename}-{os.getpid()}"), job)


def part_name(text: str) -> str:
    """A name reduced to the characters allowed in the name of a part's directory."""
    return re.sub(r"[^\w.-]", "-", text)[:80]


def _launch_options(command: Sequence[str]) -> dict[str, str] | None:
    """The options of a multi-node launcher; None if it is not one."""
    names = [Path(word).name for word in command]
    starts = [names.index(name) for name in _TORCHRUN_NAMES if name in names]
    if "accelerate" in names and "launch" in names:
        starts.append(names.index("launch"))
    if not starts:
        return None
    options: dict[str, str] = {}
    words = list(command[min(starts) + 1 :])
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        options.setdefault(name.replace("_", "-"), value if equals else following)
    return options


def open_shared_directory(directory: Path, part: Part, *, force: bool) -> Path:
    """Creates the directory of one part of a trace.

    Args:
        directory: Directory of the whole trace, which other launchers may create concurrently.
        force: Whether to delete an existing part of that name.

    Returns:
        The part's directory, empty.

    Raises:
        UsageError: The directory exists and must not, or cannot, be replaced.
        UnwritableError: The directory cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / RUN_FILE).exists():
            if any(not path.name.startswith((PART_PREFIX, ".")) for path in directory.iterdir()):
                raise UsageError(f"{directory} exists: choose another with -o")
            # Several launchers may do this at once, with the same content.
            write_run(directory, RunInfo(labels={PARTS_LABEL: True}, host=os.uname().nodename))
        elif not read_run(directory).labels.get(PARTS_LABEL):
            raise UsageError(f"{directory} is a trace of one launcher: choose another with -o")
        own = directory / (PART_PREFIX + part.name)
        force = force or holds_no_events(own)
        make_room(own, "trace", is_trace, remove_trace, force=force)
    except OSError as error:
        raise creation_error(directory, error) from error
    return own


@contextlib.contextmanager
def joined(directories: Sequence[Path]) -> Iterator[Path]:
    """Presents several trace directories as one, without copying.

    Args:
        directories: At least one directory; all of one job.

    Yields:
        A directory to open: the only one given, or one whose parts are all.

    Raises:
        UsageError: They are not of one job.
        TraceError: One of them cannot be read.
    """
    if len(directories) == 1:
        yield directories[0]
        return
    check_one_job(directories)
    with tempfile.TemporaryDirectory(prefix="ddltrace-") as name:
        whole = Path(name, "+".join(path.resolve().name for path in directories)[:100])
        whole.mkdir()
        write_run(whole, RunInfo(labels={PARTS_LABEL: True}))
        # Resolved: links that the user names are followed, links in a trace are not.
        yield joined_directory(whole, [source.resolve() for source in _flat(directories)])


def merge(directories: Sequence[Path], output: Path) -> RunInfo:
    """Merges several directories of one job, or a trace in parts, into one final trace.

    Args:
        directories: The traces, which are not changed.
        output: An existing, empty directory.

    Returns:
        The record of the whole run.

    Raises:
        UsageError: They are not of one job, or the files cannot be copied.
        TraceError: One of them cannot be read.
    """
    check_one_job(directories)
    sources = list(_flat(directories))
    write_run(output, RunInfo())
    _restrict(output, [*directories, *sources])
    notes = list(
        dict.fromkeys(note for each in (*directories, *sources) for note in left_out(each))
    )
    with joined(directories) as whole:
        run = read_run(whole)
        files = [
            path(whole, info.segment) for info in run.ranks for path in (event_path, counters_path)
        ]
        files += [ring for each in sources for ring in sorted(each.glob(RING_PATTERN))]
        for source in files:
            # What `left_out` names is not copied.
            if not source.is_file() or source.is_symlink():
                continue
            try:
                copy_plain(source, output / source.name)
            except OSError as error:
                why = error.strerror or error
                raise UsageError(f"{source} cannot be copied: {why}") from error
        labels = {key: value for key, value in run.labels.items() if key != PARTS_LABEL}
        return finalize_ranks(output, replace(run, labels=labels, notes=notes))


def _restrict(output: Path, sources: Sequence[Path]) -> None:
    """Takes from others what they may not do in each of some traces.

    Args:
        output: A directory with an initial `RUN_FILE`, which keeps its permissions when it is
            replaced.
        sources: The traces whose content it will hold.
    """
    try:
        for name in ("", RUN_FILE):
            mode = (output / name).stat().st_mode
            for source in sources:
                mode &= (source / name).stat().st_mode | stat.S_IRWXU
            (output / name).chmod(stat.S_IMODE(mode))
    except OSError as error:
        raise UsageError(f"{output} cannot be protected: {error.strerror}") from error


def check_one_job(directories: Sequence[Path]) -> None:
    """Checks that directories are of one job, by their ranks.

    Raises:
        UsageError: Two hold the same rank, or are of jobs of different sizes.
        TraceError: One of them cannot be read.
    """
    holders: dict[tuple[int, int], tuple[RankInfo, Path, int]] = {}
    sizes: dict[int, tuple[int, Path]] = {}
    for number, path in enumerate(directories):
        for info in _of_the_job(read_run(path).ranks):
            former = holders.get((info.rank, info.attempt))
            if former is not None and former[2] != number:
                what = "the same" if former[0].segment == info.segment else "a different"
                raise UsageError(
                    f"{former[1]} and {path} both hold rank {info.rank} ({what} process): "
                    "give each directory of one job once"
                )
            holders[info.rank, info.attempt] = info, path, number
            size, first = sizes.setdefault(info.attempt, (info.world_size, path))
            if size != info.world_size:
                raise UsageError(
                    f"{first} is of a job of {size} ranks, {path} of one of {info.world_size}: "
                    "only directories of one job can be joined"
                )


def check_same_time(paths: Sequence[Path]) -> None:
    """Checks that no directory's job had ended long before another's began.

    Raises:
        UsageError: One had.
    """
    times = []
    for path in paths:
        run = read_run(path)
        if run.created_unix_ns is not None:
            times.append((run.created_unix_ns, run.ended_unix_ns, path))
    for (_, ended, first), (began, _, second) in pairwise(sorted(times, key=lambda one: one[0])):
        if ended is not None and began - ended > _CLOCKS_DIFFER_S * 1e9:
            raise UsageError(
                f"{first} ended {(began - ended) / 1e9:.0f} s before {second} began: only "
                "directories of one job can be taken as one (if just their clocks differ, "
                "use ddltrace merge)"
            )


def _of_the_job(infos: Sequence[RankInfo]) -> list[RankInfo]:
    """Leaves out the processes of smaller jobs in the same traces, such as a helper for
    evaluation."""
    largest: dict[int, int] = {}
    for info in infos:
        largest[info.attempt] = max(info.world_size, largest.get(info.attempt, 0))
    return [info for info in infos if info.world_size == largest[info.attempt]]


def _flat(directories: Sequence[Path]) -> Iterator[Path]:
    for path in directories:
        if read_run(path).labels.get(PARTS_LABEL):
            parts = parts_of(path)
            if not parts:
                raise TraceError(f"{path} has no parts")
            yield from parts
        else:
            yield path
