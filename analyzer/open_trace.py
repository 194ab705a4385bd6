"""Opens traces, for `ddltrace.open` and the commands: a directory, or files of other tools.

Above both the trace and its measures: a trace that is opened here can be analyzed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.engine.engine import Engine, check_shared
from ddltrace.analyzer.trace import opened_trace
from ddltrace.analyzer.trace.suggested_commands import collect_command
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.storage.location import Location, location_of, matches
from ddltrace.tracer.storage.plain_files import local_copy
from ddltrace.tracer.trace.run_info import check_run
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.trace_files import RUN_FILE
from ddltrace.tracer.trace.trace_parts import check_same_time, joined

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analysis
    from ddltrace.tracer.storage.remote_path import RemotePath

_MAX_NAMED: Final = 8


class Trace(opened_trace.Trace):
    """One run's events, tensors and process groups, on rank 0's clock, and its analysis.

    A rank that was restarted, or whose job made several processes of the same rank one after
    the other, has several *generations*. Their events stand in one table; from the second
    generation on, steps continue counting where the former stopped on any rank, and the names of
    process groups carry ``@2``, ``@3``, so that a step number or a (group, sequence number)
    means one thing only.

    Attributes:
        path: Where it was opened.
        name: How reports call it: the last part of the path.
        run: Metadata of the run.
        ranks: The ranks of which something was recorded, ascending.
        notes: Problems that affect the numbers; grows while reading.
        damage: The notes that report damage of what was read so far: a wrong checksum or
            unreadable bytes.
        on_read: Called with the number of events whenever some were read from a file.
        memory_limit: Memory that what an analysis keeps of its steps may take, about; None for
            4 GiB. If the trace needs more, the last steps are analyzed. Set it first.
        peak_tflops: Peak of each rank's device in 10^12 floating-point operations per second, for
            the utilization; None if it is not known.
        engine: Executes the tasks of an analysis, such as those per rank.
        verified: Segment name -> whether the file of that process has its checksum, once compared.
    """

    def analyze(self, steps: range | None = None) -> Analysis:
        """Measures the trace.

        Args:
            steps: Only these consecutive steps, such as ``range(10, 20)``; by default the whole
                trace, summarized over its steady steps.

        Returns:
            The analysis, see `ddltrace.analyzer.model.Analysis`.

        Raises:
            TraceError: The trace has none of those steps.
            UsageError: The steps are not consecutive.
        """
        if steps is not None:
            opened_trace.check_consecutive(steps)
        # Later: whoever only reads events needs no measures.
        from ddltrace.analyzer.analysis import analyze

        return analyze(self, steps)


def open_trace(path: str | PathLike[str] | RemotePath, engine: Engine | None = None) -> Trace:
    """Opens a trace directory, or a file or folder of a format that can be imported.

    Args:
        path: A directory written by ``ddltrace run`` (finished, still being written, or left
            by a job that died), or an importable file or folder. A URL, such as
            ``s3://bucket/run``, names one in a store.
        engine: Executes the tasks of reading and analyzing it; by default this process.

    Returns:
        The trace; events load when asked for.

    Raises:
        TraceError: There is nothing there, or it cannot be read as a trace.
        UsageError: The URL holds credentials or unknown parameters.
        EngineError: A worker of the engine does not see the files of the trace.
    """
    location = location_of(path)
    if (location / RUN_FILE).is_file():
        if engine is not None:
            check_shared(engine, location / RUN_FILE)
        return Trace(location, read_run(location), engine=engine)
    if not location.exists():
        raise TraceError(f"{location} does not exist")
    from ddltrace.analyzer.importers import formats

    with local_copy(location, formats.MAX_FILES) as files:
        if formats.recognizes(files):
            # Copies of files from a store are on this machine only.
            imported = formats.read(files, engine if files == location else None)
            return Trace(location, check_run(imported.run), imported.tables, engine)
        unread = formats.describe_unread(files)
    if location.is_dir():
        _check_holds_none(location)
        if unread is not None:
            raise TraceError(unread)
        read_run(location)  # raises, and says what is missing
    raise TraceError(
        unread or f"{location} is neither a trace directory nor of a format that can be imported"
    )


def open_files(paths: Sequence[Path], engine: Engine | None = None) -> Trace:
    """Opens several importable files or folders as the ranks of one job.

    Args:
        paths: The files or folders, on this machine.
        engine: See `open_trace`.

    Raises:
        TraceError: They cannot be read.
    """
    from ddltrace.analyzer.importers import formats

    imported = formats.read(paths, engine)
    place = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return Trace(place, check_run(imported.run), imported.tables, engine)


def _check_holds_none(path: Location) -> None:
    """Raises if a directory that is not a trace holds some, as an experiment's does."""
    inside = [run.parent for run in matches(path, f"*/{RUN_FILE}")]
    if not inside:
        return
    shown = " ".join(shlex.quote(str(trace)) for trace in inside[:_MAX_NAMED])
    count = "a trace" if len(inside) == 1 else f"{len(inside)} traces"
    which = f"the first {_MAX_NAMED}" if len(inside) > _MAX_NAMED else "them"
    raise TraceError(
        f"{path} is not a trace, but holds {count} (show {which} with: ddltrace dashboard {shown})"
    )


@contextlib.contextmanager
def open_as_one(paths: Sequence[Location], engine: Engine | None = None) -> Iterator[Trace]:
    """Opens one trace, or several directories or files of one job as one, without copying.

    Args:
        paths: One of anything that `open_trace` takes, or several directories written by
            ``ddltrace run``, or several importable files or folders.
        engine: See `open_trace`.

    Yields:
        The trace, to be read before the end of the context.

    Raises:
        UsageError: They are not of one job.
        TraceError: One of them cannot be read.
    """
    if len(paths) == 1:
        yield open_trace(paths[0], engine)
        return
    local = [path for path in paths if isinstance(path, Path)]
    if len(local) < len(paths):
        raise UsageError(
            "only directories of this machine can be analyzed as one: gather these into one "
            f"trace with: {collect_command(paths)}"
        )
    for path in local:
        if not path.exists():
            raise TraceError(f"{path} does not exist")
    imported = [path for path in local if _is_imported(path)]
    if len(imported) == len(local):
        yield open_files(local, engine)
        return
    if imported:
        raise UsageError(
            f"{imported[0]} is not a trace of ddltrace run, as others are: they cannot be analyzed "
            "as one"
        )
    check_same_time(local)
    with joined(local) as whole:
        yield open_trace(whole, engine)


_OPENED: Final = contextlib.ExitStack()
"""What `open_until_exit` has opened."""
atexit.register(_OPENED.close)


def open_until_exit(paths: Sequence[str | os.PathLike[str]]) -> Trace:
    """As `open_as_one`, for a trace that may be read until the interpreter exits.

    Raises:
        TypeError: An argument is not a path, or `paths` no list.
        UsageError: See `open_as_one`; or there are no paths.
        TraceError: See `open_as_one`.
    """
    if not isinstance(paths, Sequence) or not all(
        isinstance(path, str | os.PathLike) for path in paths
    ):
        raise TypeError(f"a trace is opened by a path or a list of paths, not by {paths!r:.80}")
    if not paths:
        raise UsageError("the list of paths is empty: give at least one")
    return _OPENED.enter_context(open_as_one([location_of(path) for path in paths]))


def _is_imported(path: Path) -> bool:
    """Whether a path is a file, or a folder of files, of a format that can be imported."""
    from ddltrace.analyzer.importers import formats

    return not (path / RUN_FILE).is_file() and formats.recognizes(path)
