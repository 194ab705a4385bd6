"""The trace on disk: event streams while a job runs, event files when it has ended.

A trace is a directory::

    run.json                     what ran, on which hosts and ranks, what was lost
    rank-00003-0-4711.arrows     while rank 3 (attempt 0, process 4711) runs: an IPC stream
    rank-00003-0-4711.tail       and what is not in it yet; see `tail`
    rank-00003-0-4711.json       what that process knows of itself: tensors, groups, clock
    rank-00003-0-4711.arrow      when the job has ended: an IPC file in place of the stream

Streams are appended to batch by batch without a user-space buffer, so every complete batch
survives any death of the process. Everything read here may come from a stranger or from a
process that died in mid-write: it is validated, and what cannot be read is counted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import platform
import re
import shutil
import stat
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import pyarrow as pa

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.exit_status import status_text
from ddltrace.tracer.record.tail import read_tail
from ddltrace.tracer.trace.protected_file import OwnFile
from ddltrace.tracer.trace.schema import EVENTS, SCHEMA_NAME
from ddltrace.tracer.trace.stream_frames import scan_stream

RUN_FILE: Final = "run.json"
STREAM_SUFFIX: Final = ".arrows"
TAIL_SUFFIX: Final = ".tail"
FILE_SUFFIX: Final = ".arrow"
SIDECAR_SUFFIX: Final = ".json"
PART_PREFIX: Final = "part-"
"""Directories below a trace that several launchers of one job have written; see `parts`."""

PARTS_LABEL: Final = "parts"
"""Label of a run whose ranks are all in parts."""

PART_LABEL: Final = "part"
"""Label of a run that is one of several of its job: its value is the part's name."""

_SEGMENT_NAME = re.compile(r"rank-\d{5,9}-\d+-\d+\Z")
_ROWS_PER_BATCH: Final = 1 << 16
_MAX_JSON_BYTES: Final = 256 << 20
_MOST_AT_ONCE: Final = 4
_KEPT_BYTES: Final = 4 << 20
_RESERVED_BYTES: Final = 256 << 10
_MAX_RANK: Final = 1 << 24
_MAX_COUNT: Final = 1 << 53
_MAX_TIME_NS: Final = 1 << 62
_SURELY_IDLE_S: Final = 5.0
_SURELY_OVER_S: Final = 2.0
_BUFFER_BYTES: Final = 1 << 20
_FILE_MAGIC: Final = b"ARROW1"
_Content: TypeAlias = bytes | mmap.mmap
_DECODING_ERRORS: Final = (pa.ArrowException, OSError, MemoryError, OverflowError)


@dataclass(frozen=True)
class TensorInfo:
    """One parameter of the job.

    Attributes:
        id: Its number in the rank's events.
        name: The parameter's name, as ``named_parameters`` gives it.
        shape: Its shape.
        dtype: Name of its element type, without ``torch.``.
        bytes: Size of its gradient in bytes.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class GroupInfo:
    """One process group: its name in the events, its backend, its members' global ranks."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]


@dataclass
class RankInfo:
    """What one rank process recorded, and what was lost of it.

    Attributes:
        rank: Global rank.
        segment: Base name of the process's files in the trace directory.
        status: ``running``, ``complete``, or ``killed`` (ended without closing its trace).
        pid_namespace: Where `pid` is a process: containers count their own; empty if unknown.
        host: Host name.
        clock_domain: Processes with the same value share one monotonic clock.
        clock: Clock samples; see ``docs/trace-format.md``.
        events: Rows recorded.
        checksum: CRC-32 of its final file.
        dropped: Events that the bounded buffer could not take.
        lost_bytes: Bytes at the stream's end that could not be read.
        errors: Faults inside the tracer, each one line.
        cost: What recording cost, measured by the job itself: `ratio` of step times with to
            without, its 95 % interval `low` to `high`, `steps` on each side.
        silence: What the process did when it last recorded nothing for some seconds; see
            ``docs/trace-format.md``.
        gloo_times: Whether Gloo itself told when its messages began and ended.
        ended_ns: When the process ended, on its clock, if the launcher saw it.
        exit_status: How; 128 + n when signal n killed it.
    """

    rank: int
    segment: str
    world_size: int = 1
    local_rank: int | None = None
    attempt: int = 0
    pid: int | None = None
    pid_namespace: str = ""
    host: str = ""
    clock_domain: str = ""
    status: str = "running"
    level: str = "layer"
    backend: str | None = None
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    groups: list[GroupInfo] = field(default_factory=list)
    clock: dict[str, Any] = field(default_factory=dict)
    events: int | None = None
    checksum: int | None = None
    dropped: int = 0
    lost_bytes: int = 0
    errors: list[str] = field(default_factory=list)
    silence: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    gloo_times: bool = False
    ended_ns: int | None = None
    exit_status: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `rank_from_json` reads back."""
        return asdict(self)


@dataclass
class RunInfo:
    """The contents of ``run.json``.

    Attributes:
        status: ``running``, ``complete``, or ``partial`` (something is missing; see `notes`).
        command: The job's command line.
        level: What was captured: ``comm``, ``layer`` or ``op``.
        source: ``ddltrace`` for a captured trace, else the imported format.
        exit_status: The job's own status, 128 + n when killed by signal n.
        launcher_pid: The launcher's process on `host`, if there is one.
        pid_namespace: Where it is one; see `RankInfo`.
        ranks: One entry per rank process.
        notes: What a reader must know before believing the numbers, each one line.
    """

    status: str = "running"
    command: list[str] = field(default_factory=list)
    level: str = "layer"
    source: str = "ddltrace"
    version: str = ""
    host: str = ""
    created_unix_ns: int | None = None
    ended_unix_ns: int | None = None
    exit_status: int | None = None
    launcher_pid: int | None = None
    pid_namespace: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    ranks: list[RankInfo] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def segment_name(*, rank: int, attempt: int, pid: int) -> str:
    """Base name of one rank process's files."""
    return f"rank-{rank:05d}-{attempt}-{pid}"


def buffered(file: Any) -> pa.NativeFile:
    """A file of Python's for Arrow to write to, which else calls it for every piece of a batch."""
    return pa.BufferedOutputStream(pa.PythonFile(file, "w"), _BUFFER_BYTES)


class StreamWriter:
    """Appends event batches to an IPC stream; each batch is on its way to disk on return."""

    def __init__(self, path: Path) -> None:
        path.touch(exist_ok=False)
        self._path = path
        self._file = OwnFile(path)
        # Not of the job's time: the fastest codec (the file in the end is packed better) and no
        # threads, which would not survive the job's forks.
        self._buffer = buffered(self._file)
        options = pa.ipc.IpcWriteOptions(
            compression="lz4", emit_dictionary_deltas=True, use_threads=False
        )
        self._writer = pa.ipc.new_stream(self._buffer, EVENTS, options=options)
        self._buffer.flush()
        self._good = self._file.length
        self._is_cut = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends one batch.

        Raises:
            OSError: The disk is full or gone.
        """
        self._writer.write_batch(batch)
        self._buffer.flush()
        self._good = self._file.length

    def cut(self) -> None:
        """After a failed write, the last: removes the beginnings of the batch that did not fit."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            os.truncate(self._path, self._good)

    def close(self) -> None:
        """Writes the end-of-stream mark; the stream can be read without it, too."""
        try:
            if not self._is_cut:
                self._writer.close()
                self._buffer.flush()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Drops the stream without writing: for a forked child, whose parent goes on."""
        self._file.close()


def reserve(path: Path) -> None:
    """Sets some disk space aside, so that a full disk can be told of; see `write_reserved`."""
    with contextlib.suppress(OSError), open(_reserve_of(path), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)


def release(path: Path) -> None:
    """Gives back what was set aside for a file."""
    with contextlib.suppress(OSError):
        _reserve_of(path).unlink(missing_ok=True)


def take_back(directory: Path) -> None:
    """Removes a trace that nobody has begun to record."""
    release(directory / RUN_FILE)
    with contextlib.suppress(OSError):
        (directory / RUN_FILE).unlink()
        directory.rmdir()


def write_reserved(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file atomically, on a full disk into what was set aside for it.

    Raises:
        OSError: Even that does not do.
    """
    try:
        write_json_atomically(path, value)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        release(path)
        write_json_atomically(path, value)
        reserve(path)


def _reserve_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def write_json_atomically(path: Path, value: dict[str, Any]) -> None:
    """Replaces a JSON file so that a reader sees the old text or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_sidecar(directory: Path, info: RankInfo) -> None:
    """Writes what a rank process knows of itself."""
    write_reserved(directory / (info.segment + SIDECAR_SUFFIX), info.to_json())


def write_run(directory: Path, run: RunInfo) -> None:
    """Writes ``run.json``; equal tensor tables of the ranks are stored once."""
    tables: list[list[dict[str, Any]]] = []
    index_of: dict[str, int] = {}
    ranks = []
    for info in run.ranks:
        entry = info.to_json()
        table = entry.pop("tensors")
        key = json.dumps(table)
        if key not in index_of:
            index_of[key] = len(tables)
            tables.append(table)
        entry["tensor_table"] = index_of[key]
        ranks.append(entry)
    value = {"schema": SCHEMA_NAME, **asdict(run), "ranks": ranks, "tensor_tables": tables}
    write_reserved(directory / RUN_FILE, value)


def read_run(directory: Path) -> RunInfo:
    """Reads what is known of a run, also while it runs or after its launcher died.

    Args:
        directory: The trace directory.

    Returns:
        The run; rank processes that are not in ``run.json`` yet are added from their own
        files.

    Raises:
        TraceError: This is no trace, or not one that this version reads.
    """
    path = directory / RUN_FILE
    if not path.is_file():
        raise TraceError(
            f"{directory} is no trace: it has no {RUN_FILE} "
            "(record one with: ddltrace run -o DIR -- COMMAND)"
        )
    value = _read_json(path)
    schema = value.get("schema")
    if schema != SCHEMA_NAME:
        raise TraceError(
            f"{path}: schema {schema!r:.80} is not {SCHEMA_NAME!r}; "
            "read it with the version of ddltrace that wrote it"
        )
    try:
        tables = [[_tensor_from_json(t) for t in table] for table in value.pop("tensor_tables")]
        ranks = []
        for entry in value.pop("ranks"):
            tensors = tables[entry.pop("tensor_table")]
            ranks.append(rank_from_json({**entry, "tensors": []}))
            ranks[-1].tensors = tensors
        known = {f: value[f] for f in RunInfo.__dataclass_fields__ if f in value}
        run = RunInfo(**{**known, "ranks": ranks})
        _check_run(run)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise TraceError(f"{path} is damaged: {error!r:.120}") from error
    known_segments = {info.segment for info in run.ranks}
    for info in read_sidecars(directory, run.notes):
        if info.segment not in known_segments:
            run.ranks.append(info)
    if run.labels.get(PARTS_LABEL):
        if directory.name.startswith(PART_PREFIX):
            raise TraceError(f"{path} is damaged: a part in parts")
        _add_parts(directory, run)
    elif run.status == "running":
        _settle(directory, run)
    else:
        gone = [note for note in _gone(directory, run) if note not in run.notes]
        run.notes += gone
        run.status = "partial" if gone else run.status
    run.ranks.sort(key=lambda info: (info.rank, info.attempt, info.pid or 0))
    return run


def _add_parts(directory: Path, run: RunInfo) -> None:
    """Adds what the launchers of one job wrote, each in a directory of its own."""
    parts = []
    for path in sorted(directory.glob(f"{PART_PREFIX}*/{RUN_FILE}")):
        parts.append(read_run(path.parent))
    if not parts:
        return
    known: set[str] = set()
    for part in parts:
        run.ranks += [info for info in part.ranks if info.segment not in known]
        known |= {info.segment for info in part.ranks}
        run.notes += [note for note in part.notes if note not in run.notes]
    first = parts[0]
    run.command, run.level, run.version, run.source = (
        first.command,
        first.level,
        first.version,
        first.source,
    )
    run.created_unix_ns = min((p.created_unix_ns for p in parts if p.created_unix_ns), default=None)
    last = max(parts, key=lambda part: part.ended_unix_ns or 0)
    run.ended_unix_ns, run.host = last.ended_unix_ns, last.host
    run.exit_status = next((p.exit_status for p in parts if p.exit_status), first.exit_status)
    if any(part.status == "running" for part in parts):
        run.status = "running"
        return
    run.notes += _missing_ranks(run)
    run.status = "partial" if run.notes else "complete"


def _settle(directory: Path, run: RunInfo) -> None:
    """Accounts for a run that has no launcher any more, or never had one."""
    for info in run.ranks:
        if info.status == "running" and _has_died(directory, info):
            info.status = "killed"
    some_run = any(info.status == "running" for info in run.ranks)
    gone = run.launcher_pid is not None and _is_gone(run.launcher_pid, run)
    if gone:
        run.notes.append(
            "the launcher was killed or could not write: nobody noted how the job ended"
        )
    if not some_run and (run.ranks or gone):
        _account(directory, run)


def pid_namespace() -> str:
    """What tells the processes of one container from those of another; empty if nothing does."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_gone(pid: int, of: RankInfo | RunInfo) -> bool:
    """Whether a process is sure not to run any more, as far as its own host can be asked.

    Args:
        pid: Its number.
        of: Says where it was a process.
    """
    if of.host != platform.node() or not Path("/proc/self").exists():
        return False
    if of.pid_namespace and of.pid_namespace != pid_namespace():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return state[:1] in (["Z"], ["X"])  # dead, and nobody has asked for its status


def _has_died(directory: Path, info: RankInfo) -> bool:
    """Whether a process that did not close its trace is sure to be gone."""
    if info.pid is None or not _is_gone(info.pid, info):
        return False
    if info.pid_namespace:
        return True
    # One in another container may only seem to be gone; then it goes on writing.
    stream = event_path(directory, info.segment)
    written_s = []
    for path in (stream, stream.with_suffix(TAIL_SUFFIX)):
        with contextlib.suppress(OSError):
            written_s.append(path.stat().st_mtime)
    return bool(written_s) and time.time() - max(written_s) > _SURELY_IDLE_S


def read_sidecars(directory: Path, notes: list[str]) -> list[RankInfo]:
    """Reads every rank process's own file; an unreadable one becomes a note."""
    infos = []
    for path in sorted(directory.glob(f"rank-*{SIDECAR_SUFFIX}")):
        try:
            infos.append(read_sidecar(path))
        except TraceError as error:
            notes.append(f"{path.name} cannot be read ({error!s:.80}): its rank is left out")
    return infos


def read_sidecar(path: Path) -> RankInfo:
    """Reads a rank process's own file.

    Raises:
        TraceError: It is damaged.
    """
    try:
        return rank_from_json(_read_json(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(repr(error)) from error


def rank_from_json(value: dict[str, Any]) -> RankInfo:
    """Reads one rank's entry.

    Raises:
        KeyError, TypeError, ValueError: The entry is damaged.
    """
    try:
        return _rank_from_json(value)
    except OverflowError as error:  # Infinity, or a whole number that no float can hold
        raise ValueError(error) from error


def _rank_from_json(value: dict[str, Any]) -> RankInfo:
    known = {f: value[f] for f in RankInfo.__dataclass_fields__ if f in value}
    known["tensors"] = [_tensor_from_json(t) for t in known.get("tensors", [])]
    known["groups"] = [
        GroupInfo(
            name=str(g["name"]),
            description=str(g["description"]),
            backend=str(g["backend"]),
            ranks=tuple(int(r) for r in g["ranks"]),
        )
        for g in known.get("groups", [])
    ]
    info = RankInfo(**known)
    for number in (info.rank, info.world_size):
        if type(number) is not int or not 0 <= number <= _MAX_RANK:
            raise ValueError(f"rank {number!r:.40}")
    # The name becomes a path: nothing may lead out of the trace.
    if not isinstance(info.segment, str) or not _SEGMENT_NAME.match(info.segment):
        raise ValueError(f"segment {info.segment!r:.80}")
    if not isinstance(info.clock, dict) or not isinstance(info.errors, list):
        raise TypeError("clock or errors")
    if info.cost is not None:
        for key in ("ratio", "low", "high", "steps"):
            float(info.cost[key])
    if info.silence is not None:
        _check_silence(info.silence)
    for number in (info.attempt, info.dropped, info.lost_bytes, info.checksum or 0):
        if type(number) is not int or not 0 <= number <= _MAX_COUNT:
            raise ValueError(f"count {number!r:.40}")
    return info


def _check_silence(silence: Any) -> None:
    stack, step = silence["stack"], silence["step"]
    if not isinstance(stack, list) or not all(isinstance(frame, str) for frame in stack):
        raise TypeError("stack")
    if not isinstance(silence["phase"], str) or not isinstance(step, (int, type(None))):
        raise TypeError("silence")
    for number in (silence["since_ns"], silence["noticed_ns"], step or 0):
        if type(number) is not int or abs(number) > _MAX_TIME_NS:
            raise ValueError(f"silence {number!r:.40}")


def read_events(directory: Path, segment: str) -> tuple[pa.Table, int]:
    """Reads the events of one rank process, as much as can be read.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.

    Returns:
        The events in the order they were recorded, and how many bytes at the end of the
        file could not be read.

    Raises:
        TraceError: There is no event file, or nothing in it can be read.
    """
    batches = []
    reader = EventReader(directory, segment)
    for batch in reader:
        batches.append(batch)
    table = pa.Table.from_batches(batches, schema=EVENTS)
    return table.unify_dictionaries(), reader.lost_bytes


def event_path(directory: Path, segment: str) -> Path:
    """Where the events of one rank process are: its final file, else its stream."""
    if not _SEGMENT_NAME.match(segment):
        raise TraceError(f"{segment!r:.80} is no name of a rank's files")
    for suffix in (FILE_SUFFIX, STREAM_SUFFIX):
        if (path := directory / (segment + suffix)).exists():
            return path
        for path in directory.glob(f"{PART_PREFIX}*/{segment}{suffix}"):
            return path
    return directory / (segment + STREAM_SUFFIX)


class EventReader:
    """Iterates over the batches of one event file or stream, stopping at the first damage.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.
        columns: Read only these, which is several times faster; all by default.

    Attributes:
        lost_bytes: After the iteration: bytes that could not be read.
    """

    def __init__(
        self, directory: Path, segment: str, columns: Collection[str] = tuple(EVENTS.names)
    ) -> None:
        self.lost_bytes = 0
        self._path = event_path(directory, segment)
        self._columns = [number for number, name in enumerate(EVENTS.names) if name in columns]

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self.lost_bytes = 0
        is_file = self._path.suffix == FILE_SUFFIX
        # Before the stream: what a writer moves from the one to the other meanwhile is then in
        # both, never in neither, and the tail is known to be the older one.
        tail = b"" if is_file else self._tail()
        try:
            _require_regular(self._path)
            content = _map(self._path)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be opened: {error}") from error
        size = len(content)
        # Behind its magic a file is a stream, and a footer that a reader must believe is
        # one way less to be led astray.
        start = 8 if is_file else 0
        if is_file and content[:6] != _FILE_MAGIC:
            self.lost_bytes += max(1, size)
            return
        scan = scan_stream(memoryview(content), start, _Passed(content))
        if is_file and not scan.marked:
            self.lost_bytes += max(1, size - scan.end)
        elif not scan.marked:
            # A stream that ends between two messages lost nothing that is known of.
            self.lost_bytes += size - scan.end
        count, newest = 0, None
        if scan.end > start:
            for batch in self._read_stream(content, start, scan.end):
                count, newest = count + 1, batch
                yield batch
        if not tail:
            return
        try:
            last, lost = read_tail(tail, count, _words_of(newest))
        except ValueError:
            last, lost = None, len(tail)
        self.lost_bytes += lost
        if last is not None:
            yield last.select(self._columns)

    def _tail(self) -> bytes:
        """What lies in the tail of a stream now."""
        path = self._path.with_suffix(TAIL_SUFFIX)
        try:
            _require_regular(path)
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError:
            self.lost_bytes += 1
            return b""

    def _read_stream(self, content: _Content, start: int, end: int) -> Iterator[pa.RecordBatch]:
        data = pa.py_buffer(content).slice(start, end - start)
        source = pa.BufferReader(data)
        good, passed = 0, _Passed(content)
        try:
            self._check_schema(pa.ipc.read_schema(data))
            options = pa.ipc.IpcReadOptions(included_fields=self._columns)
            reader = pa.ipc.open_stream(source, options=options)
            while True:
                good = source.tell()
                batch = reader.read_next_batch()
                batch.validate(full=True)
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    if column.null_count and not EVENTS.field(name).nullable:
                        raise pa.ArrowInvalid("null where none may be")
                yield batch
                passed(start + source.tell())
        except StopIteration:
            return
        except _DECODING_ERRORS:
            self.lost_bytes += max(1, data.size - good)

    def _check_schema(self, schema: pa.Schema) -> None:
        found = (schema.metadata or {}).get(b"ddltrace.schema", b"").decode("utf-8", "replace")
        if found != SCHEMA_NAME or not schema.equals(EVENTS):
            raise TraceError(
                f"{self._path}: schema {found!r:.80} is not {SCHEMA_NAME!r}; "
                "read it with the version of ddltrace that wrote it"
            )


def _words_of(batch: pa.RecordBatch | None) -> dict[str, list[str]]:
    """The dictionaries of a batch's coded columns."""
    if batch is None:
        return {}
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return {
        name: column.dictionary.to_pylist()
        for name, column in columns
        if pa.types.is_dictionary(column.type)
    }


class _Passed:
    """Lets go of what has been read of a mapped file, which else counts as memory in use."""

    def __init__(self, content: _Content) -> None:
        self._content = content
        self._done = 0

    def __call__(self, end: int) -> None:
        """Nothing before `end` is needed now; it can be read again."""
        done = end // mmap.PAGESIZE * mmap.PAGESIZE
        if isinstance(self._content, mmap.mmap) and done - self._done >= _KEPT_BYTES:
            self._content.madvise(mmap.MADV_DONTNEED, self._done, done - self._done)
            self._done = done


def _map(path: Path) -> _Content:
    """A file's content, mapped into memory.

    Raises:
        OSError: It cannot be opened.
    """
    with open(path, "rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class _Summed:
    """A file whose contents are summed up while they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0
        self.close, self.flush, self.tell = file.close, file.flush, file.tell

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def is_as_written(directory: Path, info: RankInfo) -> bool:
    """Whether the final file of a rank is what was written then, as far as that is known."""
    path = event_path(directory, info.segment)
    if info.checksum is None or path.suffix != FILE_SUFFIX:
        return True
    found = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_BUFFER_BYTES):
                found = zlib.crc32(piece, found)
    except OSError:
        return True  # whoever reads it will say so
    return found == info.checksum


def write_events(
    directory: Path, segment: str, batches: Iterator[pa.RecordBatch]
) -> tuple[int, int]:
    """Writes a final event file from batches, in memory bounded by one written batch.

    Args:
        directory: The trace directory.
        segment: Base name of the process's files.
        batches: Batches of schema `EVENTS` whose dictionaries only grow.

    Returns:
        The number of rows written, and the file's CRC-32.
    """
    path = directory / (segment + FILE_SUFFIX)
    temporary = path.with_name(f".{path.name}.tmp")
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    rows = 0
    try:
        with (
            temporary.open("wb") as file,
            buffered(summed := _Summed(file)) as sink,
            pa.ipc.new_file(sink, EVENTS, options=options) as writer,
        ):
            for group in grouped(batches, _ROWS_PER_BATCH):
                table = pa.Table.from_batches(group, schema=EVENTS).unify_dictionaries()
                for batch in table.combine_chunks().to_batches():
                    writer.write_batch(batch)
                    rows += batch.num_rows
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return rows, summed.checksum


def finalize_rank(directory: Path, info: RankInfo) -> None:
    """Turns one rank's stream into a final file and accounts for what was lost.

    Never raises for damage: what cannot be converted stays as the stream that it was, which
    readers understand, too.
    """
    stream = directory / (info.segment + STREAM_SUFFIX)
    if info.status == "running":
        info.status = "killed"
    if not stream.exists():
        return  # `_account` says if there is no final file either
    reader = EventReader(directory, info.segment)
    try:
        info.events, info.checksum = write_events(directory, info.segment, iter(reader))
    except (TraceError, pa.ArrowException, OSError) as error:
        info.errors.append(f"the stream could not be finalized: {error!r:.200}")
        return
    info.lost_bytes = reader.lost_bytes
    tail = stream.with_suffix(TAIL_SUFFIX)
    if reader.lost_bytes == 0:
        stream.unlink()
        tail.unlink(missing_ok=True)
    else:
        # Kept under names that no reader opens: somebody may want to dig in them.
        stream.replace(stream.with_suffix(".damaged"))
        if tail.exists():
            tail.replace(tail.with_suffix(".tail-damaged"))


def finalize(
    directory: Path, run: RunInfo, ends: Mapping[str, tuple[int, int | None]] | None = None
) -> RunInfo:
    """Makes the final trace of what the ranks left, and writes ``run.json``.

    Args:
        directory: The trace directory.
        run: What the launcher knows; its `ranks` are replaced by what the ranks wrote.
        ends: When each process ended and of what, by its segment, as far as it was seen.

    Returns:
        The run as written; or, if the command ended before its ranks, as it is now: who reads it
        later sees what became of them.
    """
    run.ranks = read_sidecars(directory, run.notes)
    run.ranks.sort(key=lambda info: (info.rank, info.attempt, info.pid or 0))
    for info in run.ranks:
        if ends and info.segment in ends:
            info.ended_ns, info.exit_status = ends[info.segment]
    left = _still_recording(directory, run)
    if left:
        # Nobody watches the job any more, and nobody knows when it ends.
        write_run(directory, replace(run, ranks=[], launcher_pid=None, ended_unix_ns=None))
        release(directory / RUN_FILE)
        run.notes.append(
            f"the command ended, but rank {_listed(left)} still runs and is recorded: what there "
            "is of the trace can be read at any time"
        )
        return run
    finalize_runs_ranks(directory, run)
    # The sidecars are in run.json now; two copies could come to differ.
    for info in run.ranks:
        with contextlib.suppress(OSError):
            (directory / (info.segment + SIDECAR_SUFFIX)).unlink(missing_ok=True)
    return run


def _still_recording(directory: Path, run: RunInfo) -> list[int]:
    """Ranks of a command that is over that are not; those that are about to end may do so."""
    deadline = time.monotonic() + _SURELY_OVER_S
    while True:
        left = [info for info in run.ranks if info.status == "running" and _runs(directory, info)]
        if not left or time.monotonic() > deadline:
            return sorted({info.rank for info in left})
        time.sleep(0.05)


def _runs(directory: Path, info: RankInfo) -> bool:
    """Whether the process of a rank is sure to run."""
    if info.pid is None or info.host != platform.node() or _is_gone(info.pid, info):
        return False
    try:
        environment = Path(f"/proc/{info.pid}/environ").read_bytes()
    except OSError:
        return False
    # Its number may have gone to another process.
    return json.dumps(str(directory)).encode() in environment


def finalize_runs_ranks(directory: Path, run: RunInfo) -> RunInfo:
    """Makes the final files of the ranks of a run, and writes ``run.json``."""
    for info in run.ranks:
        release(directory / (info.segment + SIDECAR_SUFFIX))
    with ThreadPoolExecutor(_finalized_at_once(directory, run)) as pool:
        for _ in pool.map(partial(finalize_rank, directory), run.ranks):
            pass
    _account(directory, run)
    write_run(directory, run)
    release(directory / RUN_FILE)
    return run


def _finalized_at_once(directory: Path, run: RunInfo) -> int:
    """As many streams as there are cores; where the disk is short of room, one after the other."""
    most, sizes = min(os.cpu_count() or 1, _MOST_AT_ONCE), []
    for info in run.ranks:
        with contextlib.suppress(OSError):
            sizes.append((directory / (info.segment + STREAM_SUFFIX)).stat().st_size)
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return 1
    # A final file is smaller than its stream.
    return most if free > sum(sorted(sizes)[-most:]) else 1


def _account(directory: Path, run: RunInfo) -> None:
    """Marks a run `complete` or `partial` and says why."""
    attempts = sorted({info.attempt for info in run.ranks})
    if len(attempts) > 1:
        run.notes.append(
            f"the job was restarted: attempts {_listed(attempts)} are all kept, one after the other"
        )
    # The other parts of a trace have the other ranks.
    if PART_LABEL not in run.labels:
        run.notes += _missing_ranks(run)
    run.notes += _gone(directory, run)
    for info in run.ranks:
        who = f"rank {info.rank}" + (f" (attempt {info.attempt})" if len(attempts) > 1 else "")
        if info.status == "killed":
            run.notes.append(f"{who} ended without closing its trace{_how(info)}")
        if info.lost_bytes:
            run.notes.append(f"{who}: the last {info.lost_bytes} bytes are unreadable")
        if info.dropped:
            run.notes.append(f"{who}: {info.dropped} events dropped: buffer or disk full")
        if info.errors:
            run.notes.append(f"{who}: {len(info.errors)} tracer errors: {info.errors[0]}")
    run.status = "partial" if run.notes else "complete"


def _how(info: RankInfo) -> str:
    """How a process ended, if somebody saw it."""
    return "" if info.exit_status is None else f": {status_text(info.exit_status)}"


def _gone(directory: Path, run: RunInfo) -> list[str]:
    """A note for every process whose events nobody can read any more."""
    return [
        f"rank {info.rank}: what process {info.pid} recorded is gone"
        for info in run.ranks
        if not event_path(directory, info.segment).exists()
    ]


def _missing_ranks(run: RunInfo) -> list[str]:
    """A note for every attempt of which not all ranks were recorded."""
    sizes: dict[int, int] = {}
    for info in run.ranks:
        sizes[info.attempt] = max(sizes.get(info.attempt, 0), info.world_size)
    notes = []
    for attempt, world_size in sorted(sizes.items()):
        present = {info.rank for info in run.ranks if info.attempt == attempt}
        missing = sorted(set(range(world_size)) - present)
        if missing:
            which = f" in attempt {attempt}" if len(sizes) > 1 else ""
            notes.append(f"no trace of rank {_listed(missing)} of {world_size}{which}")
    return notes


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def grouped(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    """Batches, as many at a time as have at least so many rows together."""
    group: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        group.append(batch)
        count += batch.num_rows
        if count >= rows:
            yield group
            group, count = [], 0
    if group:
        yield group


def _require_regular(path: Path) -> None:
    """Refuses what is no plain file: a link leads out of the trace, a pipe never ends.

    Raises:
        OSError: It is none.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("not a plain file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        _require_regular(path)
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise TraceError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MB: not a trace's")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read: {error!s:.120}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path} is damaged: not a JSON object")
    return value


def _tensor_from_json(value: dict[str, Any]) -> TensorInfo:
    return TensorInfo(
        id=int(value["id"]),
        name=str(value["name"]),
        shape=tuple(int(n) for n in value["shape"]),
        dtype=str(value["dtype"]),
        bytes=int(value["bytes"]),
    )


def _check_run(run: RunInfo) -> None:
    if not isinstance(run.notes, list) or not isinstance(run.command, list):
        raise TypeError("notes or command")
    if not isinstance(run.labels, dict):
        raise TypeError("labels")
