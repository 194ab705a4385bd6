"""The records of ``run.json``: a run, its rank processes, their tensors and process groups.

The records are read from files that may come from a stranger or be damaged, so msgspec checks every
value when it is read, by the types of the fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final, TypedDict

from msgspec import Meta, convert

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.schema import LARGE_RUN_SCHEMA_NAME, SCHEMA_NAME
from ddltrace.tracer.trace.trace_files import SEGMENT_NAME

PARTS_LABEL: Final = "parts"
"""Label of a run that consists of parts."""

PART_LABEL: Final = "part"
"""Label of a run that is one part of a job's trace; its value is the part's name."""

JOB_LABEL: Final = "job"
"""Label of a run with the name that its launcher has for the job, such as that of Slurm."""

_MOST_MEMBERS: Final = 1 << 16
"""With more members of groups in total, each list of members is stored once."""

# Within these bounds, no arithmetic of the analysis overflows.
_Rank = Annotated[int, Meta(ge=0, le=1 << 24)]
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Time = Annotated[int, Meta(gt=-(1 << 62), lt=1 << 62)]
# The name becomes a path, which must stay inside the trace.
_Segment = Annotated[str, Meta(pattern=SEGMENT_NAME)]


class Cost(TypedDict):
    """Overhead of recording, measured in the job; see ``docs/trace-format.md``."""

    ratio: float
    low: float
    high: float
    steps: _Count


class Silence(TypedDict):
    """What a process did when it recorded nothing; see ``docs/trace-format.md``."""

    since_ns: _Time
    noticed_ns: _Time
    step: _Count | None
    phase: str
    stack: list[str]


class _Steps(TypedDict):
    first: _Count
    stop: _Count | None
    level: str


class Window(_Steps, total=False):
    """A range of steps that was recorded.

    Attributes:
        first: Its first step.
        stop: The step after the last; None for the end of the job.
        level: Its level of detail.
        reason: What began it, if a trigger did.
    """

    reason: str


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

    id: _Id
    name: str
    shape: tuple[_Count, ...]
    dtype: str
    bytes: _Count


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
    ranks: tuple[_Rank, ...]
    timeout_ms: _Count | None = None
    size: _Count | None = None
    store: str | None = None
    place: _Count | None = None


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
        cost: Overhead of recording; None if it was not measured.
        silence: What the process did when it last recorded nothing for some seconds.
        gloo_times: Whether Gloo's threads recorded the times of its messages.
        collections: Whether garbage collections were recorded.
        checkpoints: Whether checkpoints and evaluations were recorded.
        native_missing: Why the compiled library was not used, so that all was recorded in Python;
            None if it was, or if that is not known.
        windows: The ranges of steps that were recorded, if recording was switched on or off
            meanwhile.
        control: Socket on which the process takes orders to switch; empty if there is none.
        ended_ns: When the process ended, on its clock, if the launcher observed it.
        exit_status: Exit status of the process; 128 + n if signal n killed it.
    """

    rank: _Rank
    segment: _Segment
    world_size: _Rank = 1
    role: str | None = None
    store: str | None = None
    local_rank: int | None = None
    attempt: _Count = 0
    pid: _Count | None = None
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
    events: _Count | None = None
    checksum: _Count | None = None
    counters: _Count | None = None
    counters_checksum: _Count | None = None
    counters_dropped: _Count = 0
    dropped: _Count = 0
    lost_bytes: _Count = 0
    refused_connections: _Count = 0
    errors: list[str] = field(default_factory=list)
    silence: Silence | None = None
    cost: Cost | None = None
    gloo_times: bool = False
    collections: bool = False
    checkpoints: bool = False
    native_missing: str | None = None
    windows: list[Window] = field(default_factory=list)
    control: str = ""
    ended_ns: _Time | None = None
    exit_status: _Count | None = None

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
    created_unix_ns: _Time | None = None
    ended_unix_ns: _Time | None = None
    exit_status: int | None = None
    launcher_pid: _Count | None = None
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
            own = asdict(replace(group, ranks=()))
            stored = {name: value for name, value in own.items() if value is not None}
            if is_large:
                del stored["ranks"]
                stored["member_table"] = _index(member_tables, tuple(group.ranks))
            else:
                stored["ranks"] = group.ranks
            entry["groups"].append(stored)
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


def _index(tables: dict[Any, int], table: Any) -> int:
    """Index of a table, which is added if it is new."""
    return tables.setdefault(table, len(tables))


def run_from_json(value: dict[str, Any]) -> RunInfo:
    """Reads what `run_to_json` returns.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: The contents are damaged.
    """
    tensor_tables = convert(value["tensor_tables"], list[list[TensorInfo]])
    member_tables = None
    if value["schema"] == LARGE_RUN_SCHEMA_NAME:
        member_tables = convert(value["member_tables"], list[tuple[_Rank, ...]])
    ranks = []
    for entry in value["ranks"]:
        tensors, groups = tensor_tables[entry["tensor_table"]], entry.get("groups", [])
        info = rank_from_json({**entry, "groups": [] if member_tables else groups})
        if member_tables:
            for group in groups:
                named = convert({**group, "ranks": ()}, GroupInfo)
                info.groups.append(replace(named, ranks=member_tables[group["member_table"]]))
        info.tensors = tensors
        ranks.append(info)
    run = convert({**value, "ranks": []}, RunInfo)
    run.ranks = ranks
    _check_segments(run)
    return run


def rank_from_json(value: Any) -> RankInfo:
    """Reads one rank's entry.

    Raises:
        ValueError: The entry is damaged.
    """
    return convert(value, RankInfo)


def check_run(run: RunInfo) -> RunInfo:
    """Checks the values of a run that was not read from ``run.json``, and returns it.

    Raises:
        TraceError: It has a value that no tracer writes; says which.
    """
    # Many ranks share one object: to check it for each would be quadratic in the ranks.
    members = {id(group.ranks): group for info in run.ranks for group in info.groups}
    try:
        convert(asdict(replace(run, ranks=[])), RunInfo)
        for info in run.ranks:
            convert(asdict(replace(info, groups=[])), RankInfo)
        convert([asdict(group) for group in members.values()], list[GroupInfo])
        _check_segments(run)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"the trace is damaged: {error!s:.120}") from error
    return run


def _check_segments(run: RunInfo) -> None:
    names = [info.segment for info in run.ranks]
    if len(set(names)) < len(names):
        raise ValueError("two ranks have the same segment")
