"""The records of ``run.json``: a run, its rank processes, their tensors and process groups.

The records are read from files that may come from a stranger or be damaged, so every value is
checked when it is read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from ddltrace.tracer.trace.schema import LARGE_RUN_SCHEMA_NAME, SCHEMA_NAME
from ddltrace.tracer.trace.trace_files import is_segment_name

PARTS_LABEL: Final = "parts"
"""Label of a run that consists of parts."""

PART_LABEL: Final = "part"
"""Label of a run that is one part of a job's trace; its value is the part's name."""

JOB_LABEL: Final = "job"
"""Label of a run with the name that its launcher has for the job, such as that of Slurm."""

_MOST_MEMBERS: Final = 1 << 16
"""With more members of groups in total, each list of members is stored once."""

_MAX_RANK: Final = 1 << 24
_MAX_COUNT: Final = 1 << 53
_MAX_TIME_NS: Final = 1 << 62


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
    """One process group.

    Attributes:
        name: Its name in the events.
        description: What the job calls it.
        backend: Its backend.
        ranks: Its members' global ranks; empty if unknown.
        timeout_ms: Timeout of its collectives; None if unknown.
        size: How many members it has, where `ranks` does not say; None if unknown.
        store: Address at which its members met, where that is not the `RankInfo.store` of their
            job: processes of other jobs may be members, and `ranks` is what the job registered.
        place: This process's place among the members of such a group.
    """

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    timeout_ms: int | None = None
    size: int | None = None
    store: str | None = None
    place: int | None = None


@dataclass
class RankInfo:
    """Metadata of one rank process: what it recorded and what was lost.

    Attributes:
        rank: Global rank.
        segment: Base name of the process's files in the trace directory.
        role: What the process does, in a job of several roles; None if the job does not say.
        store: Address at which the ranks of the default process group met; None if unknown. It
            differs for jobs that run beside each other.
        status: ``running``, ``complete``, or ``killed`` (ended without closing its trace).
        flushed: Whether the process has left its process groups and recorded nothing since that is
            not written: if it ends or is replaced by `exec`, its trace is complete.
        pid_namespace: Namespace of `pid`, since containers number their own processes; empty if
            unknown.
        host: Host name.
        clock_domain: Processes with the same value share one monotonic clock.
        clock: Clock samples; see ``docs/trace-format.md``.
        events: Rows recorded.
        checksum: CRC-32 of its final file.
        counters: Rows of its counter file; None if it recorded no counters.
        counters_checksum: CRC-32 of its final counter file.
        counters_dropped: Readings of counters that could not be written.
        dropped: Events that did not fit in the bounded buffer.
        lost_bytes: Bytes at the stream's end that could not be read.
        refused_connections: Connections to the process that did not prove the job's secret.
        errors: Faults inside the tracer, one line each.
        cost: Overhead of recording, measured in the job: `ratio` of step times with and without
            recording, its 95 % interval `low` to `high`, and `steps` on each side.
        silence: What the process did when it last recorded nothing for some seconds; see
            ``docs/trace-format.md``.
        gloo_times: Whether Gloo's threads recorded the times of its messages.
        collections: Whether garbage collections were recorded.
        checkpoints: Whether checkpoints and evaluations were recorded.
        native_missing: Why the compiled library was not used, so that all was recorded in Python;
            None if it was, or if that is not known.
        windows: The ranges of steps that were recorded, if recording was switched on or off
            meanwhile: `first` step, `stop` (the step after the last; None for the end of the
            job), `level` and, if a trigger began it, `reason`.
        control: Socket on which the process takes orders to switch; empty if there is none.
        ended_ns: When the process ended, on its clock, if the launcher observed it.
        exit_status: Exit status of the process; 128 + n if signal n killed it.
    """

    rank: int
    segment: str
    world_size: int = 1
    role: str | None = None
    store: str | None = None
    local_rank: int | None = None
    attempt: int = 0
    pid: int | None = None
    pid_namespace: str = ""
    host: str = ""
    clock_domain: str = ""
    status: str = "running"
    flushed: bool = False
    level: str = "layer"
    backend: str | None = None
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    groups: list[GroupInfo] = field(default_factory=list)
    clock: dict[str, Any] = field(default_factory=dict)
    events: int | None = None
    checksum: int | None = None
    counters: int | None = None
    counters_checksum: int | None = None
    counters_dropped: int = 0
    dropped: int = 0
    lost_bytes: int = 0
    refused_connections: int = 0
    errors: list[str] = field(default_factory=list)
    silence: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    gloo_times: bool = False
    collections: bool = False
    checkpoints: bool = False
    native_missing: str | None = None
    windows: list[dict[str, Any]] = field(default_factory=list)
    control: str = ""
    ended_ns: int | None = None
    exit_status: int | None = None

    @property
    def is_off(self) -> bool:
        """Whether recording is switched off."""
        return bool(self.windows) and self.windows[-1]["stop"] is not None

    def end(self) -> None:
        """Notes that the process has ended."""
        if self.status == "running":
            self.status = "complete" if self.flushed else "killed"

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `rank_from_json` reads back."""
        return asdict(self)


@dataclass
class RunInfo:
    """The contents of ``run.json``.

    Attributes:
        status: ``running``, ``complete``, or ``partial`` (something is missing; see `notes`).
        command: The job's command line.
        level: Level of detail: ``comm``, ``layer`` or ``op``.
        source: ``ddltrace`` for a captured trace, else the imported format.
        exit_status: The job's own status, 128 + n when killed by signal n.
        launcher_pid: Process id of the launcher on `host`, if there is one.
        pid_namespace: Namespace of `launcher_pid`; see `RankInfo`.
        ranks: One entry per rank process.
        notes: Limitations of the trace that a reader must know, one line each.
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


def run_to_json(run: RunInfo) -> dict[str, Any]:
    """The contents of ``run.json``; equal tensor tables of the ranks are stored once.

    If the members of all groups of all ranks are few, they stand in each rank's entry, as all
    versions of ddltrace read them. Otherwise equal lists of members are stored once as well, and
    the schema is another one, so that earlier versions refuse the file.
    """
    is_large = sum(len(g.ranks) for info in run.ranks for g in info.groups) > _MOST_MEMBERS
    tensor_tables: dict[tuple[TensorInfo, ...], int] = {}
    member_tables: dict[tuple[int, ...], int] = {}
    ranks = []
    for info in run.ranks:
        entry = replace(info, tensors=[], groups=[]).to_json()
        del entry["tensors"]
        for group in info.groups:
            entry["groups"].append(_group_to_json(group, member_tables if is_large else None))
        entry["tensor_table"] = _index(tensor_tables, tuple(info.tensors))
        ranks.append(entry)
    value = {
        "schema": LARGE_RUN_SCHEMA_NAME if is_large else SCHEMA_NAME,
        **asdict(replace(run, ranks=[])),
        "ranks": ranks,
        "tensor_tables": [[asdict(tensor) for tensor in table] for table in tensor_tables],
    }
    return {**value, "member_tables": list(member_tables)} if is_large else value


def share_groups(info: RankInfo, known: dict[GroupInfo, GroupInfo]) -> None:
    """Replaces the groups of a rank by equal ones of other ranks.

    Each rank's own record lists all members of its groups; kept for each rank, they would be
    quadratic in the ranks.

    Args:
        info: The rank; its groups are replaced.
        known: Each group that other ranks have; new ones are added.
    """
    info.groups = [known.setdefault(group, group) for group in info.groups]


def _group_to_json(
    group: GroupInfo, member_tables: dict[tuple[int, ...], int] | None
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "name": group.name,
        "description": group.description,
        "backend": group.backend,
    }
    for name in ("timeout_ms", "size", "store", "place"):
        if getattr(group, name) is not None:
            own[name] = getattr(group, name)
    if member_tables is None:
        return {**own, "ranks": group.ranks}
    return {**own, "member_table": _index(member_tables, tuple(group.ranks))}


def _index(tables: dict[Any, int], table: Any) -> int:
    """Index of a table, which is added if it is new."""
    return tables.setdefault(table, len(tables))


def run_from_json(value: dict[str, Any]) -> RunInfo:
    """Reads what `run_to_json` returns.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError: The contents
            are damaged.
    """
    tensor_tables = [[_tensor_from_json(t) for t in table] for table in value["tensor_tables"]]
    member_tables = None
    if value["schema"] == LARGE_RUN_SCHEMA_NAME:
        member_tables = [_members_from_json(table) for table in value["member_tables"]]
    ranks = []
    for entry in value["ranks"]:
        tensors = tensor_tables[entry.pop("tensor_table")]
        groups = entry.pop("groups", [])
        ranks.append(rank_from_json(entry))
        ranks[-1].tensors = tensors
        ranks[-1].groups = [_group_from_json(group, member_tables) for group in groups]
    known = {f: value[f] for f in RunInfo.__dataclass_fields__ if f in value}
    run = RunInfo(**{**known, "ranks": ranks})
    _check_run(run)
    return run


def rank_from_json(value: dict[str, Any]) -> RankInfo:
    """Reads one rank's entry.

    Raises:
        KeyError, TypeError, ValueError: The entry is damaged.
    """
    try:
        return _rank_from_json(value)
    except OverflowError as error:  # Infinity, or an integer beyond the range of floats
        raise ValueError(error) from error


def _rank_from_json(value: dict[str, Any]) -> RankInfo:
    known = {f: value[f] for f in RankInfo.__dataclass_fields__ if f in value}
    known["tensors"] = [_tensor_from_json(t) for t in known.get("tensors", [])]
    known["groups"] = [_group_from_json(group, None) for group in known.get("groups", [])]
    info = RankInfo(**known)
    for number in (info.rank, info.world_size):
        if type(number) is not int or not 0 <= number <= _MAX_RANK:
            raise ValueError(f"rank {number!r:.40}")
    # The name becomes a path, which must stay inside the trace.
    if not isinstance(info.segment, str) or not is_segment_name(info.segment):
        raise ValueError(f"segment {info.segment!r:.80}")
    if not isinstance(info.clock, dict) or not isinstance(info.errors, list):
        raise TypeError("clock or errors")
    for word in ("native_missing", "role", "store"):
        if not isinstance(getattr(info, word), (str, type(None))):
            raise TypeError(word)
    if info.cost is not None:
        for key in ("ratio", "low", "high", "steps"):
            float(info.cost[key])
    if info.silence is not None:
        _check_silence(info.silence)
    if not isinstance(info.control, str):
        raise TypeError("control")
    _check_windows(info.windows)
    for number in (
        *(info.attempt, info.dropped, info.lost_bytes, info.checksum or 0),
        *(info.counters or 0, info.counters_checksum or 0, info.counters_dropped),
        info.refused_connections,
    ):
        if type(number) is not int or not 0 <= number <= _MAX_COUNT:
            raise ValueError(f"count {number!r:.40}")
    return info


def _tensor_from_json(value: dict[str, Any]) -> TensorInfo:
    return TensorInfo(
        id=int(value["id"]),
        name=str(value["name"]),
        shape=tuple(int(n) for n in value["shape"]),
        dtype=str(value["dtype"]),
        bytes=int(value["bytes"]),
    )


def _group_from_json(
    value: dict[str, Any], member_tables: list[tuple[int, ...]] | None
) -> GroupInfo:
    if member_tables is None:
        members = _members_from_json(value["ranks"])
    else:
        members = member_tables[value["member_table"]]
    for name in ("timeout_ms", "size", "place"):
        number = value.get(name)
        if number is not None and (type(number) is not int or not 0 <= number <= _MAX_COUNT):
            raise ValueError(f"{name} {number!r:.40}")
    store = value.get("store")
    return GroupInfo(
        name=str(value["name"]),
        description=str(value["description"]),
        backend=str(value["backend"]),
        ranks=members,
        timeout_ms=value.get("timeout_ms"),
        size=value.get("size"),
        store=None if store is None else str(store),
        place=value.get("place"),
    )


def _members_from_json(value: list[Any]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in value)


def _check_run(run: RunInfo) -> None:
    if not isinstance(run.notes, list) or not isinstance(run.command, list):
        raise TypeError("notes or command")
    if not isinstance(run.labels, dict):
        raise TypeError("labels")


def _check_windows(windows: list[dict[str, Any]]) -> None:
    for window in windows:
        for step in (window["first"], window["stop"] or 0):
            if type(step) is not int or not 0 <= step <= _MAX_COUNT:
                raise ValueError(f"window {window!r:.80}")
        if not all(isinstance(window.get(key, ""), str) for key in ("level", "reason")):
            raise TypeError("windows")


def _check_silence(silence: Any) -> None:
    stack, step = silence["stack"], silence["step"]
    if not isinstance(stack, list) or not all(isinstance(frame, str) for frame in stack):
        raise TypeError("stack")
    if not isinstance(silence["phase"], str) or not isinstance(step, (int, type(None))):
        raise TypeError("silence")
    for number in (silence["since_ns"], silence["noticed_ns"], step or 0):
        if type(number) is not int or abs(number) > _MAX_TIME_NS:
            raise ValueError(f"silence {number!r:.40}")
