"""NCCL's events of a trace, on rank 0's clock, with the messages and tensors that they belong to.

NCCL knows no names of parameters, and the trace no algorithms. Both recorded the same call in the
same process: NCCL takes a message over while the job launches it, so the message of an event is the
last one of its operation, size and address that was launched before. Communicators and process
groups correspond one to one, and their sequence numbers rise together; pairs that contradict this
are left without a message. For views, the events become rows of schema `EVENTS`: a lane per channel
and per proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import NULL_NS
from ddltrace.analyzer.importers.communication import public_op
from ddltrace.analyzer.importers.imported import Row, table_of
from ddltrace.analyzer.importers.nccl_operations import bytes_of
from ddltrace.analyzer.nccl.messages import Ints, is_kind, numbers, parents_in_job, rows_of_parents
from ddltrace.analyzer.nccl.ring_file import COLUMNS, Ring, read_ring, recognizes
from ddltrace.tracer.errors import TraceError, is_store_failure
from ddltrace.tracer.nccl.event_kinds import KINDS
from ddltrace.tracer.nccl.job_rings import MAGIC
from ddltrace.tracer.storage.location import Location, matches
from ddltrace.tracer.storage.plain_files import PLAIN, kind_of
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import RING_PATTERN, parts_of

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.trace.run_info import RankInfo

NCCL_EVENTS: Final = pa.schema(
    [
        *COLUMNS,
        *(("step", pa.int32()), ("message", pa.int64()), ("tensors", pa.list_(pa.string()))),
    ]
)
"""Columns of `nccl_events`; `docs/nccl.md` describes them."""

_TIMES: Final = ("start_ns", "end_ns", "gpu_wait_ns", "peer_wait_ns", "net_wait_ns")
_NONE: Final = -1

_Key: TypeAlias = tuple[str | None, int, int]
"""Operation, bytes and address of messages; -1 where they are not known."""


def ring_paths(trace: Trace) -> list[Location]:
    """The rings of a trace, those of its parts too."""
    if isinstance(trace.path, Path) and trace.path.is_file():
        with trace.path.open("rb") as file:
            return [trace.path] if recognizes(file.read(len(MAGIC))) else []
    folders = [trace.path, *parts_of(trace.path)]
    found = [path for folder in folders for path in matches(folder, RING_PATTERN)]
    return [path for path in found if not isinstance(path, Path) or kind_of(path) == PLAIN]


def nccl_events(trace: Trace, rank: int | None = None) -> pa.Table:
    """The events of NCCL that a trace has; without rows if there are none.

    A ring that cannot be read, or whose process is not in the trace, is left out.

    Args:
        trace: The trace. What is left out or missing is noted in it if all ranks are read.
        rank: Only those of this rank.
    """
    tables = []
    for path in ring_paths(trace):
        try:
            ring = read_ring(path)
        except TraceError as error:
            if is_store_failure(error):
                raise
            notes, info = [str(error)], None
        else:
            info = _process_of(trace, ring)
            notes = [f"{path.name}: {note}" for note in ring.notes]
            if info is None:
                notes = [f"{path.name} is left out: the trace has no process {ring.pid} of it"]
        if rank is None:
            trace.notes += [note for note in notes if note not in trace.notes]
        if info is not None and rank in {None, info.rank}:
            tables.append(_events_of(trace, ring, info))
    return pa.concat_tables(tables) if tables else NCCL_EVENTS.empty_table()


def _process_of(trace: Trace, ring: Ring) -> RankInfo | None:
    """The rank process that wrote a ring."""
    for info in trace.run.ranks:
        same_rank = ring.rank in {None, trace.own_rank(info)}
        if info.pid == ring.pid and same_rank and (not ring.host or info.host in {ring.host, ""}):
            return info
    return None


def _events_of(trace: Trace, ring: Ring, info: RankInfo) -> pa.Table:
    table = ring.events
    rank = pa.array(np.full(len(table), info.rank, np.int32))
    table = table.set_column(0, COLUMNS.field("rank"), rank)
    clock = trace.clocks[info.segment]
    for name in _TIMES:
        at = COLUMNS.get_field_index(name)
        times = numbers(table, name)
        missing = times == NULL_NS
        moved = clock.apply(np.where(missing, 0, times))
        table = table.set_column(at, COLUMNS.field(name), pa.array(moved, mask=missing))
    messages = _Messages(trace, info.rank)
    found = _inherited(table, _matches(table, messages))
    known = found != _NONE
    at = pa.array(np.where(known, found, 0), mask=~known)
    columns = [*table.columns, *(each.take(at) for each in messages.columns)]
    return pa.table(dict(zip(NCCL_EVENTS.names, columns, strict=True))).cast(NCCL_EVENTS)


class _Messages:
    """The messages of a rank.

    Attributes:
        op: Operation of each.
        bytes: Its bytes, of a message that only receives those that it receives; -1 if unknown.
        launched: When it was launched.
        group: Its group, as a number.
        seq: Its number in the group.
        buffer: Address of its first tensor; -1 if the trace does not have it.
        columns: Step, id and tensors' names, as in `NCCL_EVENTS`.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        table = trace.events(rank)
        is_message = pc.equal(table["kind"].combine_chunks().cast(pa.string()), "message")
        table = table.filter(is_message)
        launched = pc.coalesce(table["enqueue_ns"], table["start_ns"])
        table = table.take(pc.sort_indices(launched))
        self.launched = np.asarray(launched.take(pc.sort_indices(launched)).to_numpy())
        self.op: list[str | None] = table["op"].cast(pa.string()).to_pylist()
        size = pc.coalesce(table["bytes"], table["out_bytes"])
        self.bytes = np.asarray(size.fill_null(_NONE).to_numpy())
        codes = table["group"].combine_chunks().cast(pa.string()).dictionary_encode()
        self.group = np.asarray(codes.indices.fill_null(_NONE).to_numpy(zero_copy_only=False))
        self.seq = numbers(table, "seq", _NONE)
        self.buffer = numbers(table, "buffer", _NONE)
        names = trace.tensor_names(rank)
        tensors = [
            None if each is None else [names.get(number, f"tensor {number}") for number in each]
            for each in table["tensors"].to_pylist()
        ]
        self.columns = (
            table["step"].combine_chunks(),
            table["id"].combine_chunks(),
            pa.array(tensors, pa.list_(pa.string())),
        )


def _matches(table: pa.Table, messages: _Messages) -> Ints:
    """The place of each event's message among those of the rank; -1 without one."""
    found = np.full(len(table), _NONE)
    rows = np.flatnonzero(is_kind(table, "coll", "p2p", "ce_coll"))
    if not len(rows) or not len(messages.launched):
        return found
    part = table.take(rows)
    start = numbers(part, "start_ns")
    of_key: dict[_Key, list[int]] = {}
    columns = (messages.op, messages.bytes.tolist(), messages.buffer.tolist())
    whole = list(zip(*columns, strict=True))
    # An address decides only where all messages that it could be have one.
    lacking = {(op, size) for op, size, buffer in whole if buffer == _NONE}
    for place, (op, size, buffer) in enumerate(whole):
        of_key.setdefault((op, size, _NONE), []).append(place)
        if (op, size) not in lacking:
            of_key.setdefault((op, size, buffer), []).append(place)
    for key, mine in _by_key(part, of_key):
        launched = np.array(of_key[key])
        last = np.searchsorted(messages.launched[launched], start[mine], side="right") - 1
        # Those of one group call come together, after all of them were launched.
        behind = _from_the_end(last)
        launch = last - behind
        taken = np.where(launch >= 0, launched[np.maximum(launch, 0)], _NONE)
        found[rows[mine]] = taken
    return _consistent(table, found, messages)


def _by_key(part: pa.Table, of_key: dict[_Key, list[int]]) -> Iterator[tuple[_Key, Ints]]:
    """The messages of NCCL by the operation, bytes and address that the job's messages have.

    Where none of the job's messages has the address (PyTorch sends a copy of some lists of
    tensors) or the trace has no addresses, operation and bytes decide.
    """
    ops = {name: public_op(name or "") for name in part["func"].unique().to_pylist()}
    sizes = dict(zip(*_comm_sizes(part), strict=True))
    places: dict[_Key, list[int]] = {}
    wanted = ("func", "bytes", "comm", "send_buffer", "recv_buffer")
    rows = zip(*(part[name].to_pylist() for name in wanted), strict=True)
    for place, (func, size, comm, *buffers) in enumerate(rows):
        op = ops[func]
        given, taken = bytes_of(op or "", size, sizes.get(comm, 1))
        whole = given if given is not None else taken
        key = next(
            (
                (each, number, address)
                for address in (*buffers, _NONE)
                # NCCL has no barrier of its own, and a gather is made of sends.
                for each in (op, "barrier" if op == "all_reduce" else op)
                for number in (whole if whole is not None else _NONE, _NONE)
                if (each, number, address) in of_key
            ),
            None,
        )
        if key is not None:
            places.setdefault(key, []).append(place)
    for key, mine in places.items():
        yield key, np.array(mine)


def _comm_sizes(part: pa.Table) -> tuple[list[str], list[int]]:
    comms = part["comm"].unique().to_pylist()
    sizes = [part.filter(pc.equal(part["comm"], each))["comm_size"] for each in comms if each]
    return [each for each in comms if each], [pc.max(each).as_py() or 1 for each in sizes]


def _from_the_end(values: Ints) -> Ints:
    """Of each run of equal values, how many of it follow."""
    if not len(values):
        return values
    ends = np.flatnonzero(np.append(np.diff(values) != 0, True))
    return np.asarray(ends[np.searchsorted(ends, np.arange(len(values)))] - np.arange(len(values)))


def _consistent(table: pa.Table, found: Ints, messages: _Messages) -> Ints:
    """Leaves out pairs of a communicator with another group, and those out of order."""
    rows = np.flatnonzero(found != _NONE)
    comms = table["comm"].take(pa.array(rows)).combine_chunks().dictionary_encode().indices
    comm = np.asarray(comms.fill_null(_NONE).to_numpy(zero_copy_only=False))
    group = messages.group[found[rows]]
    kept = np.ones(len(rows), np.bool_)
    for each in np.unique(comm):
        mine = comm == each
        values, counts = np.unique(group[mine], return_counts=True)
        kept &= ~mine | (group == values[np.argmax(counts)])
    seq = messages.seq[found[rows]]
    own = numbers(table, "seq", _NONE)[rows]
    func = np.asarray(
        table["func"].take(pa.array(rows)).combine_chunks().dictionary_encode().indices
    )
    for key in {*zip(comm.tolist(), func.tolist(), strict=True)}:
        mine = np.flatnonzero((comm == key[0]) & (func == key[1]) & (own != _NONE) & kept)
        mine = mine[np.argsort(own[mine], kind="stable")]
        rising = np.maximum.accumulate(seq[mine]) if len(mine) else seq[mine]
        kept[mine[seq[mine] < rising]] = False
    _, first = np.unique(found[rows[kept]], return_index=True)
    once = np.zeros(int(kept.sum()), np.bool_)
    once[first] = True
    result = np.full(len(found), _NONE)
    chosen = rows[kept][once]
    result[chosen] = found[chosen]
    return result


def _inherited(table: pa.Table, found: Ints) -> Ints:
    """Gives the events below a message its place."""
    parents = rows_of_parents(table, np.arange(len(table)))
    # Message, operation or kernel channel, step or phase, network request.
    for _ in range(3):
        lacking = (found == _NONE) & (parents >= 0)
        found = np.where(lacking, found[np.maximum(parents, 0)], found)
    return found


PREFIX: Final = "nccl/"
"""How the lanes begin."""

_HIDDEN: Final = ("net_plugin",)  # of the same time as their steps


def nccl_rows(trace: Trace, rank: int) -> pa.Table:
    """The events of NCCL in one rank; without rows if there are none."""
    table = nccl_events(trace, rank)
    if not len(table):
        return EVENTS.empty_table()
    # As readers of exported files want it, nothing begins before the trace's first event.
    is_shown = numbers(table, "start_ns") >= trace.origin_ns
    is_shown &= is_kind(table, *(kind for kind in KINDS if kind not in _HIDDEN))
    parents, shown = parents_in_job(table), np.flatnonzero(is_shown)
    return table_of(list(_rows(table, parents, shown)))


def _rows(table: pa.Table, parents: Ints, shown: Ints) -> Iterator[Row]:
    names = ("kind", "func", "variant", "channel", "is_send", "peer", "step_number")
    column = {name: table[name].to_pylist() for name in names}
    size, step = table["bytes"].to_pylist(), table["step"].to_pylist()
    start, end = numbers(table, "start_ns").tolist(), table["end_ns"].to_pylist()

    def above(row: int) -> int:
        return int(parents[row]) if parents[row] >= 0 else row

    for row in shown.tolist():
        kind = column["kind"][row]
        outer = above(row)
        if kind in {"kernel_ch", "kernel_phase"}:
            lane = f"channel {column['channel'][row]}"
            name = column["variant"][row] or column["func"][outer] or kind
        elif kind in {"proxy_op", "proxy_step"}:
            op = row if kind == "proxy_op" else outer
            verb = "send to" if column["is_send"][op] else "receive from"
            lane = f"{verb.split(maxsplit=1)[0]}, channel {column['channel'][op]}"
            number = column["step_number"][row]
            name = f"{verb} {column['peer'][op]}" if kind == "proxy_op" else f"step {number}"
        else:
            lane = "proxy control" if kind == "proxy_ctrl" else "host"
            name = column["func"][row] or kind
        yield Row(
            start_ns=start[row],
            end_ns=end[row],
            kind="marker",
            name=name,
            lane=PREFIX + lane,
            step=step[row],
            bytes=size[row],
            status=None if end[row] is None else "ok",
        )


def with_nccl(trace: Trace, rank: int) -> pa.Table:
    """The events of a rank, and behind them those of NCCL."""
    table, more = trace.events(rank), nccl_rows(trace, rank)
    return pa.concat_tables([table, more]).unify_dictionaries() if len(more) else table


def windows_with_nccl(trace: Trace, rank: int) -> Iterator[pa.Table]:
    """The windows of a rank's events (`Trace.windows`), and behind them those of NCCL."""
    yield from trace.windows(rank)
    if len(more := nccl_rows(trace, rank)):
        yield more
