"""Reads the Parquet files of ByteDance's StragglerAnalysis: one row per operation and worker.

The operations of one tensor-parallel group are recorded on one of its ranks only. Times are
seconds from the start of each step; the trace does not contain the time between steps, so they are
placed end to end. Bytes are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from ddltrace.analyzer.events.event_columns import ColumnTable, changes, distinct
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, ImportedTrace, coded, events_table
from ddltrace.analyzer.importers.memory_limit import check_memory
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.analyzer.importers.straggler_analysis.operations import (
    BACKWARD,
    CHUNK_MARK,
    CLIP,
    COLLECTIVES,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    LAYERNORM,
    OPERATIONS,
    OPTIMIZER,
    PIPELINE,
    WORKERS_LABEL,
    Operation,
    Recorded,
    match_calls,
)
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.arrow_arrays import integers
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "straggler-analysis"

_MAGIC: Final = b"PAR1"
_INTEGERS: Final = ("dp_rank", "stage", "rank", "step", "seq_id", "mc")
_TIMES: Final = ("start_ts", "duration")
_REQUIRED: Final = (*_INTEGERS, "optype", *_TIMES)
_MAX_NUMBER: Final = 1 << 24
_MAX_STEP: Final = (1 << 31) - 2
_MAX_SECONDS: Final = 1e5
"""A step is not longer."""

_CONTENT_BYTES: Final = 40
"""What a row takes decompressed."""

_MOST_COMPRESSED: Final = 64
"""The largest ratio of decompressed to compressed size; a recording stays below it."""

_ROW_BYTES: Final = 320
"""Memory that one row takes while it is read and as an event."""

_PHASES: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    CLIP: "optimizer",
    **{name: direction.compute.split("-")[0] for name, direction in PIPELINE.items()},
}
_KINDS: Final = {FORWARD: "kernel", BACKWARD: "kernel", OPTIMIZER: "kernel", GARBAGE: "host"}
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Rows(ColumnTable):
    """All operations of a job, sorted by rank, step and start.

    Attributes:
        replica: Data-parallel rank of the worker.
        stage: Its pipeline stage.
        rank: Its global rank.
        step: Number of the training step.
        number: Number among the operations of the same name in a step of a worker.
        chunk: Model chunk; -1 for none.
        name: Place in `OPERATIONS`.
        start: Start from the start of the step, ns.
        end: End from the start of the step, ns.
    """

    replica: Integers
    stage: Integers
    rank: Integers
    step: Integers
    number: Integers
    chunk: Integers
    name: Integers
    start: Integers
    end: Integers


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is a Parquet file; its columns are listed at its end."""
    return head.startswith(_MAGIC)


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the trace of one job.

    Raises:
        TraceError: There are several files, a file has other columns, or its values contradict
            each other.
    """
    if len(paths) > 1:
        raise TraceError(
            f"{paths[0].parent} holds {len(paths)} Parquet files: a StragglerAnalysis file is a "
            "job of its own, so name one file"
        )
    [path] = paths
    run = RunInfo(status="complete", level="op", source=NAME)
    rows = _read_rows(path, run)
    ranks = distinct(rows.rank)
    stride = int(np.gcd.reduce(ranks)) if len(ranks) > 1 else 1
    world = len(ranks) * stride if int(ranks[-1]) < len(ranks) * stride else int(ranks[-1]) + 1
    if world > len(ranks):
        run.notes.append(
            f"{len(ranks)} of {world} ranks {agreeing(len(ranks), 'is')} recorded: "
            "StragglerAnalysis records one rank of each tensor-parallel group"
        )
    run.notes.append(
        "StragglerAnalysis records times from the start of each step and no bytes: steps are "
        "placed end to end, and messages have no bandwidth"
    )
    unpaired = _unpaired_calls(rows, run.notes)
    tables = {}
    layout = _Layout(rows)
    run.labels[WORKERS_LABEL] = {str(rank): list(at) for at, rank in layout.rank_at.items()}
    base = _step_starts(rows)
    for part in _by_rank(rows):
        rank = int(part.rank[0])
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            world_size=world,
            clock_domain=NAME,
            clock={"monotonic_ns": 0, "unix_ns": 0, "samples": []},
            status="complete",
            level="op",
            backend="nccl",
            device="cuda",
            groups=layout.groups(part),
        )
        table = _events(part, layout, base, unpaired)
        info.events = table.num_rows
        run.ranks.append(info)
        tables[info.segment] = table
    return number_messages(run, tables)


def _read_rows(path: Path, run: RunInfo) -> _Rows:
    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
        missing = [name for name in _REQUIRED if name not in file.schema_arrow.names]
        if missing:
            raise TraceError(
                f"{path} is a Parquet file, but not StragglerAnalysis's: it has no column "
                f"{missing[0]}"
            )
        rows = file.metadata.num_rows
        content = min(rows * _CONTENT_BYTES, _MOST_COMPRESSED * path.stat().st_size)
        check_memory(path, rows * _ROW_BYTES, content)
        table = file.read(columns=list(_REQUIRED))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"{path} is damaged: {str(error).splitlines()[0]:.100}") from error
    if not table.num_rows:
        raise TraceError(f"{path} holds no operation")
    columns = {name: _whole_numbers(path, table, name) for name in _INTEGERS}
    start, duration = (_nanoseconds(path, table, name) for name in _TIMES)
    name, known = _operation_names(path, table)
    if not known.all():
        run.notes.append(f"{counted(int((~known).sum()), 'operation')} of unknown type left out")
        run.status = "partial"
    found = _Rows(
        replica=columns["dp_rank"],
        stage=columns["stage"],
        rank=columns["rank"],
        step=columns["step"],
        number=columns["seq_id"],
        chunk=columns["mc"],
        name=name,
        start=start,
        end=start + duration,
    )
    found = found.keep(np.flatnonzero(known))
    if not len(found):
        raise TraceError(f"{path} holds no operation of a known type")
    found = found.keep(np.lexsort((found.number, found.name, found.start, found.step, found.rank)))
    _check_workers(path, found)
    return found


def _whole_numbers(path: Path, table: pa.Table, name: str) -> Integers:
    column = table[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise TraceError(f"{path} is damaged: column {name} is not of whole numbers")
    values = column.cast(pa.int64()).to_numpy()
    least = -1 if name == "mc" else 0
    most = _MAX_STEP if name == "step" else _MAX_NUMBER
    if int(values.min()) < least or int(values.max()) > most:
        raise TraceError(f"{path} is damaged: column {name} has a value beyond {least} to {most}")
    return np.asarray(values, np.int64)


def _nanoseconds(path: Path, table: pa.Table, name: str) -> Integers:
    column = table[name]
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise TraceError(f"{path} is damaged: column {name} is not of numbers")
    seconds = column.cast(pa.float64()).fill_null(-1.0).to_numpy()
    if not np.all((seconds >= 0) & (seconds < _MAX_SECONDS)):
        raise TraceError(f"{path} is damaged: column {name} has a value that is not a time")
    return np.asarray(np.rint(seconds * 1e9), np.int64)


def _operation_names(path: Path, table: pa.Table) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The place of each row's type in `OPERATIONS`, and whether it is one of them."""
    column = table["optype"]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise TraceError(f"{path} is damaged: column optype is not of texts")
    place = pc.index_in(column, value_set=pa.array(OPERATIONS, column.type)).fill_null(-1)
    found = np.asarray(place.to_numpy(), np.int64)
    return found, found >= 0


def _check_workers(path: Path, rows: _Rows) -> None:
    """Checks that ranks and workers are the same, and that no operation is there twice.

    Raises:
        TraceError: They are not.
    """
    workers = np.unique(np.stack([rows.rank, rows.replica, rows.stage]), axis=1)
    places = np.unique(workers[1:], axis=1)
    if len(distinct(workers[0])) != workers.shape[1] or places.shape[1] != workers.shape[1]:
        raise TraceError(f"{path} is damaged: a rank has several places, or a place several ranks")
    order = np.lexsort((rows.number, rows.name, rows.step, rows.rank))
    sorted_rows = rows.keep(order)
    same = np.ones(len(rows) - 1, dtype=bool)
    for column in (sorted_rows.rank, sorted_rows.step, sorted_rows.name, sorted_rows.number):
        same &= column[1:] == column[:-1]
    if same.any():
        raise TraceError(
            f"{path} is damaged: {int(same.sum())} operations are there twice (same rank, step, "
            "optype and seq_id)"
        )


def _unpaired_calls(rows: _Rows, notes: list[str]) -> set[Operation]:
    """The sends and receives that move nothing in the first step of the first replica."""
    mine = rows.keep(
        np.flatnonzero((rows.replica == rows.replica.min()) & (rows.step == rows.step.min()))
    )
    try:
        calls = match_calls(_recorded(mine), int(rows.stage.max()) + 1)
    except TraceError as error:
        notes.append(f"sends and receives are paired by their order: {error}")
        return set()
    return {call.operation for call in calls if call.pair is None}


def _recorded(rows: _Rows) -> list[Recorded]:
    columns = zip(
        rows.name.tolist(),
        rows.number.tolist(),
        rows.stage.tolist(),
        rows.start.tolist(),
        rows.end.tolist(),
        rows.chunk.tolist(),
        strict=True,
    )
    return [
        Recorded(Operation(OPERATIONS[name], number, stage), start, end, chunk)
        for name, number, stage, start, end, chunk in columns
    ]


def _by_rank(rows: _Rows) -> Iterator[_Rows]:
    bounds = np.flatnonzero(changes(rows.rank))
    for begin, stop in zip(bounds, np.append(bounds[1:], len(rows)), strict=True):
        yield rows.keep(slice(int(begin), int(stop)))


def _step_starts(rows: _Rows) -> tuple[Integers, Integers]:
    """The numbers of all steps, and where each is placed: behind the end of the former, ns."""
    steps, place = np.unique(rows.step, return_inverse=True)
    walls = np.zeros(len(steps), np.int64)
    np.maximum.at(walls, place, rows.end)
    if float(walls.sum(dtype=np.float64)) > MAX_TIME_NS:
        raise TraceError("the steps are longer than any trace")
    return steps, np.append(0, np.cumsum(walls))


class _Layout:
    """Which ranks communicate with each other."""

    def __init__(self, rows: _Rows) -> None:
        workers = np.unique(np.stack([rows.replica, rows.stage, rows.rank]), axis=1)
        self.rank_at = {
            (replica, stage): rank for replica, stage, rank in zip(*workers.tolist(), strict=True)
        }
        self.stages = int(rows.stage.max()) + 1
        self.numbers = int(rows.number.max()) + 1

    def group(self, name: str, replica: int, stage: int) -> tuple[str, tuple[int, ...]]:
        """The process group of an operation on a worker, and its ranks."""
        at = self.rank_at
        if name in PIPELINE:
            ranks = [rank for (its, _), rank in at.items() if its == replica]
            return f"pipeline-{replica}", tuple(ranks)
        if name in DATA_PARALLEL:
            ranks = [rank for (_, its), rank in at.items() if its == stage]
            return f"data-parallel-{stage}", tuple(ranks)
        if name == EMBEDDING:
            ends = sorted({0, self.stages - 1})
            return f"embedding-{replica}", tuple(
                at[replica, its] for its in ends if (replica, its) in at
            )
        if name == LAYERNORM:
            # The other ranks of the tensor-parallel group are not recorded.
            rank = at[replica, stage]
            return f"tensor-parallel-{rank}", (rank,)
        return "world", tuple(sorted(at.values()))

    def groups(self, part: _Rows) -> list[GroupInfo]:
        """The process groups of the operations of one rank."""
        replica, stage = int(part.replica[0]), int(part.stage[0])
        found = {}
        for code in distinct(part.name).tolist():
            name = OPERATIONS[code]
            if name in COLLECTIVES or name in PIPELINE:
                group, ranks = self.group(name, replica, stage)
                found[group] = GroupInfo(group, "", "nccl", ranks)
        return list(found.values())


def _events(
    part: _Rows, layout: _Layout, base: tuple[Integers, Integers], unpaired: set[Operation]
) -> pa.Table:
    """The events of one rank: its operations, and behind them its steps."""
    replica, stage = int(part.replica[0]), int(part.stage[0])
    steps, starts = base
    place = np.searchsorted(steps, part.step)
    own = distinct(part.step)
    own_place = np.searchsorted(steps, own)
    # Per type of operation, then the row of each operation, then one row per step.
    facts = [_facts(name, layout, replica, stage) for name in OPERATIONS]
    is_call = np.array([fact["kind"] == "message" for fact in facts])[part.name]
    seq = (place * len(OPERATIONS) + part.name) * layout.numbers + part.number
    is_pair = np.array([fact["peer"] is not None for fact in facts])[part.name]
    for call in (each for each in unpaired if each.stage == stage):
        is_pair &= ~((part.name == OPERATIONS.index(call.name)) & (part.number == call.number))
    peer = np.array([-1 if fact["peer"] is None else fact["peer"] for fact in facts])[part.name]
    tag = np.array([fact["tag"] for fact in facts])[part.name]
    extra = len(own)
    chunk = np.maximum(part.chunk, 0)
    lanes, lane = _lanes(facts, part.name, chunk)
    columns = {
        "start_ns": integers(np.append(part.start + starts[place], starts[own_place])),
        "end_ns": integers(np.append(part.end + starts[place], starts[own_place + 1])),
        "step": _column("step", np.append(part.step, own)),
        "seq": _column("seq", np.append(np.where(is_call & (tag < 0), seq, -1), _none(extra))),
        "peer": _column("peer", np.append(np.where(is_pair, peer, -1), _none(extra))),
        "tag": _column("tag", np.append(tag, _none(extra))),
        "lane": coded("lane", np.append(lane, np.full(extra, len(lanes))), [*lanes, "main"]),
    }
    for field in ("kind", "name", "phase", "op", "group", "status"):
        texts = [*(fact[field] for fact in facts), {"kind": "step", "name": "step"}.get(field)]
        codes = np.append(part.name, np.full(extra, len(facts)))
        missing = np.array([text is None for text in texts])[codes]
        columns[field] = coded(field, codes, [text or "" for text in texts], missing)
    return events_table(len(part) + extra, columns)


def _facts(name: str, layout: _Layout, replica: int, stage: int) -> dict[str, Any]:
    """What the events of one type of operation have in common on one rank."""
    message = name in COLLECTIVES or name in PIPELINE
    direction = PIPELINE.get(name)
    op = COLLECTIVES.get(name)
    peer = None
    if direction is not None:
        op = "send" if direction.is_send else "recv"
        peer = layout.rank_at.get((replica, (stage + direction.to) % layout.stages))
    group = layout.group(name, replica, stage)[0] if message else None
    return {
        "kind": "message" if message else _KINDS[name],
        "name": clean(name),
        "phase": _PHASES.get(name, "other"),
        "op": op,
        "group": group,
        "status": "ok" if message else None,
        "peer": peer,
        "tag": -1 if direction is None else int(direction.compute == BACKWARD),
        "lane": f"comm/{group}" if message else "main" if name == GARBAGE else "stream-compute",
    }


def _lanes(
    facts: list[dict[str, Any]], name: Integers, chunk: Integers
) -> tuple[list[str], Integers]:
    """The lanes of the operations: each model chunk has its own."""
    chunks = int(chunk.max(initial=0)) + 1
    texts = [
        f"{fact['lane']}{CHUNK_MARK}{number}" if number else str(fact["lane"])
        for fact in facts
        for number in range(chunks)
    ]
    return texts, name * chunks + chunk


def _column(name: str, values: Integers) -> pa.Array:
    """A column in which a negative value stands for null."""
    return integers(values, values < 0, EVENTS.field(name).type)


def _none(count: int) -> Integers:
    return np.full(count, -1, np.int64)
