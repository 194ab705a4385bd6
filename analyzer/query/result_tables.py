"""Provides an analysis as Arrow tables for SQL, pandas and other tools.

Times with ``_ns`` are on rank 0's clock, as in `Trace.events`; durations carry ``_us``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, IntArray
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.joined.executions import (
    DEVICE_KINDS,
    HOST_KINDS,
    KINDS,
    Executions,
    no_executions,
)
from ddltrace.analyzer.joined.join import State
from ddltrace.analyzer.joined.nccl_events import nccl_events
from ddltrace.analyzer.measures.hta_definitions import hta_ranks
from ddltrace.analyzer.measures.measure import Measure
from ddltrace.analyzer.measures.operation_rows import grouped
from ddltrace.analyzer.measures.rank_measures import AMOUNTS
from ddltrace.analyzer.model import MEASURES, Analyzed, flat_row
from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.tracer.trace.counters import COUNTER_LIST
from ddltrace.tracer.trace.schema import EVENTS

MOST_AT_ONCE: Final = 1_000_000
"""Events of a rank that are read at once."""


class EventStream:
    """The events of all ranks, with a column ``rank`` before those of the schema.

    Any consumer of Arrow streams can read it repeatedly. Ranks are read one after the other. A
    rank with at most `MOST_AT_ONCE` events is sorted by start; a longer one is read in parts, in
    the order of recording, so that no consumer needs memory for all its events.
    """

    schema: Final = pa.schema([pa.field("rank", pa.int32()), *EVENTS])

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.to_batches())
        return reader.__arrow_c_stream__(requested_schema)

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """All events, some at a time."""
        for rank in self._trace.ranks:
            for batch in chain.from_iterable(table.to_batches() for table in self._tables(rank)):
                ranks = pa.array(np.full(batch.num_rows, rank, dtype=np.int32))
                yield pa.RecordBatch.from_arrays([ranks, *batch.columns], schema=self.schema)

    def _tables(self, rank: int) -> Iterator[pa.Table]:
        known = sum(info.events or 0 for info in self._trace.infos(rank))
        if known > MOST_AT_ONCE:
            return self._trace.event_windows(rank)
        return self._trace.event_tables(rank)


def counters_table(trace: Trace) -> pa.Table:
    """One row per resource counter and sample.

    Columns:
        rank: Global rank.
        host: Name of its host.
        time_ns: When it was sampled, on rank 0's clock.
        step: Step of the process at that time; null outside all steps.
        name: The counter.
        instance: The network interface, or the UUID of the device; null for others.
        value: The value.
        unit: Its unit.
    """
    units = {counter.name: counter.unit for counter in COUNTER_LIST}
    tables = []
    for rank in trace.ranks:
        table = trace.counters(rank)
        names = table["name"].to_pylist()
        host = trace.infos(rank)[-1].host
        tables.append(
            pa.table(
                {
                    "rank": pa.array(np.full(len(table), rank, np.int32)),
                    "host": pa.array([host] * len(table), pa.string()),
                    "time_ns": table["time_ns"],
                    "step": table["step"],
                    "name": pa.array(names, pa.string()),
                    "instance": table["instance"].cast(pa.string()),
                    "value": table["value"],
                    "unit": pa.array([units.get(name) for name in names], pa.string()),
                }
            )
        )
    return pa.concat_tables(tables)


def nccl_events_table(trace: Trace) -> pa.Table:
    """One row per event of NCCL's profiler plugin (``ddltrace run --nccl``, or a folder of rings).

    Columns:
        rank: Global rank.
        pid: Process.
        event: Number of the event in its process, from 1.
        kind: ``group``, ``coll``, ``p2p``, ``proxy_op``, ``proxy_step``, ``proxy_ctrl``,
            ``kernel_ch``, ``net_plugin``, ``group_api``, ``coll_api``, ``p2p_api``,
            ``kernel_launch``, ``ce_coll``, ``ce_sync``, ``ce_batch`` or ``kernel_phase``.
        parent: Number of the event that it is a part of; null without one.
        parent_pid: Process of the parent, if that is another one (PXN).
        group_event: Number of the group of a message.
        comm: The communicator, equal on all its ranks.
        comm_name: Its name.
        comm_rank: Rank in the communicator.
        comm_size: Ranks of the communicator.
        start_ns: Begin.
        end_ns: End, of a message when NCCL had enqueued it; null if it was not observed.
        func: Operation, such as ``AllReduce``.
        seq: Number of a collective in its communicator, of its operation.
        datatype: Type of the elements in NCCL, such as ``ncclFloat32``.
        count: Number of elements.
        bytes: Elements in bytes; of a step what it carried, of a batch and a network request its
            size, of an operation what it carried (interface version 3 only).
        algo: NCCL's algorithm, such as ``RING``.
        proto: NCCL's protocol, such as ``SIMPLE``.
        channels: Channels of a message.
        channel: Channel of a proxy operation, kernel channel or phase.
        warps: Warps of a channel.
        root: Root of a collective, in the communicator; 0 without one.
        peer: Other rank of a send, receive or proxy operation, in the communicator.
        is_send: Whether a proxy operation sends.
        steps: Steps of a proxy operation.
        step_number: Number of a step in its operation; of a phase 0 (initial synchronization),
            1 (compute) or 2 (final synchronization).
        chunk_bytes: Most bytes of a step of a proxy operation.
        gpu_start_ns: Begin of a kernel channel or phase by the GPU's timer.
        gpu_end_ns: End of a kernel channel or phase by the GPU's timer.
        gpu_wait_ns: When a step began to wait for the GPU.
        peer_wait_ns: When the step of a send began to wait for its peer, of a receive for a flush.
        net_wait_ns: When a step began to wait for the network.
        device: Network device of a request with InfiniBand verbs, or number of a socket.
        graph_captured: Whether a call was captured by a CUDA graph.
        is_symmetric: Whether a collective uses symmetric memory.
        variant: Variant of a kernel, synchronization of a copy engine, or name of a phase.
        user_tag: The job's own tag of a call.
        send_buffer: Address of the input.
        recv_buffer: Address of the output.
        stream: Address of the CUDA stream.
        step: Step of the message in the trace; null without one.
        message: Id of this message.
        tensors: Names of the parameters that it carries.
    """
    return nccl_events(trace)


def hta_queue_length_table(trace: Trace) -> pa.Table:
    """One row per change of the length of a stream's queue, as HTA's time series has it.

    Columns:
        rank: Global rank.
        stream: Number of the stream.
        time_us: Time since the first event of all ranks.
        queue_length: Works launched and not begun, from this time on.
    """
    return _series_table(trace, "queues", {"stream": pa.int64(), "queue_length": pa.int64()})


def hta_copy_bandwidth_table(trace: Trace) -> pa.Table:
    """One row per change of the bandwidth of a kind of copy, as HTA's time series has it.

    Columns:
        rank: Global rank.
        name: The kind of copy, such as ``Memcpy HtoD``.
        time_us: Time since the first event of all ranks.
        gigabytes_per_s: Bandwidth of the copies that run from this time on, together.
    """
    columns = {"name": pa.string(), "gigabytes_per_s": pa.float64()}
    return _series_table(trace, "bandwidths", columns)


def _series_table(trace: Trace, kind: str, columns: dict[str, pa.DataType]) -> pa.Table:
    """All series of a kind; none for other formats.

    Args:
        kind: Attribute of `HtaRank`.
        columns: Name and type of the columns of its keys and values.
    """
    ranks = hta_ranks(trace) if trace.run.source == "kineto" else []
    first = min((each.first_ns for each in ranks), default=0)
    key_type, value_type = columns.values()
    key_name, value_name = columns
    schema = pa.schema(
        {"rank": pa.int32(), key_name: key_type, "time_us": pa.float64(), value_name: value_type}
    )
    parts = [
        pa.table(
            [
                pa.repeat(pa.scalar(each.rank, pa.int32()), len(series.value)),
                pa.repeat(pa.scalar(key, key_type), len(series.value)),
                (series.time_ns - first) / 1e3,
                series.value,
            ],
            schema=schema,
        )
        for each in ranks
        for key, series in getattr(each, kind).items()
    ]
    return pa.concat_tables([schema.empty_table(), *parts])


def messages_table(analyzed: Analyzed) -> pa.Table:
    """One row per message, joined across ranks, with its wait and its transfer.

    Columns:
        rank: Global rank.
        op: Operation.
        group: Name of the process group.
        seq: Its number in the group.
        step: Step in whose window it starts.
        peer: The other side, or the root.
        tag: Tag of a send or receive.
        bytes: Bytes of its input.
        out_bytes: Bytes of its output.
        start_ns: Its start.
        end_ns: Its end; null if it is open or the time is unknown.
        duration_us: From its start to its end.
        wait_us: From its start to its release, at most to its end; null if one is unknown.
        transfer_us: The rest of its duration.
        waited_for_rank: The rank that released it; its own if it did not wait.
        collective: Its collective, the column of this name in ``collectives``; null for sends and
            receives.
        partner: For a send or receive: the row of the other side in this table, from 0.
    """
    joined = analyzed.joined
    messages = joined.messages
    wait, transfer = joined.wait_and_transfer()
    duration = np.where(messages.end == NULL_NS, NULL, messages.end - messages.start)
    return pa.table(
        {
            "rank": messages.rank,
            "op": _coded(messages.op, messages.ops),
            "group": _coded(messages.group, messages.groups),
            "seq": _known(messages.seq),
            "step": _known(messages.step),
            "peer": _known(messages.peer),
            "tag": _known(messages.tag),
            "bytes": _known(messages.bytes),
            "out_bytes": _known(messages.out_bytes),
            "start_ns": messages.start,
            "end_ns": _known(messages.end, NULL_NS),
            "duration_us": _us(duration, duration != NULL),
            "wait_us": _us(wait, wait != NULL),
            "transfer_us": _us(transfer, transfer != NULL),
            "waited_for_rank": _known(joined.releaser),
            "collective": _known(joined.collective),
            "partner": _known(joined.partner),
        }
    )


def collectives_table(analyzed: Analyzed) -> pa.Table:
    """One row per collective.

    Columns:
        collective: Its number in this trace, which its messages have in ``messages``.
        op: Operation.
        group: Name of the process group.
        seq: Its number in the group.
        step: Step in which the last rank entered it.
        bytes: Input bytes of one rank, the largest.
        ranks: Ranks whose message was recorded.
        state: ``complete``, ``open``, ``partial`` or ``mismatch``.
        first_ns: The first arrival.
        last_ns: The last arrival.
        end_ns: The last end; null if an end is unknown.
        last_rank: The last rank to arrive.
        lateness_us: Last arrival minus the median arrival of the other ranks.
        arrival_skew_us: Last arrival minus the first.
        wait_us: Sum over ranks of the last arrival minus theirs; null unless it is complete.
        transfer_us: Last end minus last arrival; null unless it is complete.
    """
    joined = analyzed.joined
    one = joined.collectives
    done = one.timed
    transfer = np.where(done, np.maximum(one.end - one.last, 0), 0)
    return pa.table(
        {
            "collective": np.arange(len(one)),
            "op": _coded(one.op, joined.messages.ops),
            "group": _coded(one.group, joined.messages.groups),
            "seq": one.seq,
            "step": _known(one.step),
            "bytes": _known(one.bytes),
            "ranks": one.ranks,
            "state": _coded(one.state, [state.name.lower() for state in State]),
            "first_ns": one.first,
            "last_ns": one.last,
            "end_ns": _known(one.end, NULL_NS),
            "last_rank": one.last_rank,
            "lateness_us": (one.last - one.others) / 1e3,
            "arrival_skew_us": (one.last - one.first) / 1e3,
            "wait_us": _us(one.wait, done),
            "transfer_us": _us(transfer, done),
        }
    )


def path_table(analyzed: Analyzed) -> pa.Table:
    """One row per piece of the critical path of every step.

    Columns:
        step: The step.
        rank: The rank on which the piece is.
        category: As in the keys of ``steps[].critical_path``, such as ``compute``.
        name: Layer, tensor or operation; null without a name.
        start_ns: Its begin.
        end_ns: Its end, where the next piece of the step begins.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("step", "rank", "category", "name", "start_ns", "end_ns")
    }
    names: list[str] = []
    for step, path in analyzed.paths.items():
        names = path.names
        columns["step"].append(np.full(len(path), step))
        for column, values in (
            ("rank", path.rank),
            ("category", path.category),
            ("name", path.name),
            ("start_ns", path.start),
            ("end_ns", path.end),
        ):
            columns[column].append(values)
    whole = {
        name: np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        for name, parts in columns.items()
    }
    return pa.table(
        {
            **whole,
            "category": _coded(whole["category"], list(CATEGORIES)),
            "name": _coded(whole["name"], names),
        }
    )


def rank_steps_table(analyzed: Analyzed) -> pa.Table:
    """One row per rank and step: where its time went; null where the trace does not show.

    Columns:
        rank: Global rank.
        step: The step; -1 for the whole trace if it has no steps.
        start_ns: Begin of the rank's step.
        launches: Kernels, copies and messages that were launched in it.
        samples: Samples in the batches that it fetched; null without a batch, or if not known.
        tokens: Tokens in them likewise.
        flops: Floating-point operations of its operators; null if they were not recorded.
        gc_us: Python's garbage collections of at least 1 ms; null if they were not recorded.
        wall_us: Duration of the rank's step.
        compute_us: Compute.
        comm_us: Communication.
        overlap_us: Overlap.
        exposed_us: Exposed communication.
        copy_us: Copies outside of compute and communication.
        idle_us: Idle time.
        waiting_us: Waiting.
        transfer_us: Transfer.
        sync_us: A message waits for its release, and the rank does not compute.
        blocked_us: A thread of the host is blocked in a wait.
        data_us: Data loading.
        update_us: The optimizer's update.
        update_alone_us: The update on the host without communication; 0 with recorded device work.
        host_us: Other code of the host.
        stopped_us: No thread of the process ran.
        exposed_wait_us: Waiting without compute and copies.
        exposed_transfer_us: Transfer without compute.
        idle_data_us: Idle time while the host fetches a batch.
        idle_other_rank_us: Idle time while the host is blocked on a message that another rank has
            not entered.
        idle_message_us: Idle time while the host is blocked on another message.
        idle_host_us: Idle time while the host runs code.
        idle_stopped_us: Idle time while no thread of the process ran.
        idle_unknown_us: Idle time of which nothing was recorded.
        idle_in_phase_us: The part of ``idle_host_us`` inside of forward, backward and optimizer.
        launch_gap_us: The part of ``idle_host_us`` in gaps of at most 1 ms.
    """
    columns = {}
    for name, values in analyzed.analysis.rank_steps.items():
        if name in AMOUNTS:
            columns[name] = pa.array(np.nan_to_num(values).astype(np.int64), mask=~(values > 0))
        elif name == "start_ns" or not name.endswith("_ns"):
            columns[name] = pa.array(np.asarray(values).astype(np.int64))
        else:
            columns[name[:-3] + "_us"] = pa.array(values / 1e3, mask=np.isnan(values))
    return pa.table(columns)


def kernels_table(analyzed: Analyzed) -> pa.Table:
    """One row per kernel or kind of copy, rank and step.

    Columns:
        rank: Global rank.
        step: The step; null outside of steps.
        name: Its name.
        kind: ``compute``, ``communication`` or ``copy``.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        min_us: Shortest duration.
        max_us: Longest duration.
    """
    return _operations_table(analyzed.executions, DEVICE_KINDS)


def operators_table(analyzed: Analyzed) -> pa.Table:
    """One row per operator or runtime call, rank and step.

    Columns:
        rank: Global rank.
        step: The step; null outside of steps.
        name: Its name.
        kind: ``operator`` or ``runtime``.
        count: How often it ran.
        total_us: Sum of its durations.
        mean_us: Mean duration.
        p95_us: 95th percentile of its durations.
        min_us: Shortest duration.
        max_us: Longest duration.
        self_us: Sum of its durations without nested operators and runtime calls.
        device_us: Durations of the kernels and copies launched in it.
        self_device_us: The same without those launched by another operator in it.
    """
    return _operations_table(analyzed.executions, HOST_KINDS)


def _operations_table(found: Executions, kinds: tuple[str, ...]) -> pa.Table:
    rows = found.of_kinds(kinds)
    keys = [found.name[rows], found.kind[rows], found.step[rows], found.rank[rows]]
    groups = grouped(keys, found.duration[rows])
    first = rows[groups.first]
    columns = {
        "rank": pa.array(found.rank[first]),
        "step": _known(found.step[first]),
        "name": _coded(found.name[first], found.names),
        "kind": _coded(found.kind[first], list(KINDS)),
        "count": pa.array(groups.count),
        "total_us": pa.array(groups.total / 1e3),
        "mean_us": pa.array(groups.total / 1e3 / np.maximum(groups.count, 1)),
        "p95_us": pa.array(groups.p95 / 1e3),
        "min_us": pa.array(groups.low / 1e3),
        "max_us": pa.array(groups.high / 1e3),
    }
    if kinds == HOST_KINDS:
        for name, values in (
            ("self_us", found.own),
            ("device_us", found.device),
            ("self_device_us", found.own_device),
        ):
            sums = np.bincount(groups.of_entry, values[rows], len(groups))
            columns[name] = pa.array(sums / 1e3)
    return pa.table(columns)


def _of_rows(measure: Measure[Any, Any], record: type) -> Callable[[Analyzed], pa.Table]:
    def table(analyzed: Analyzed) -> pa.Table:
        value = getattr(analyzed.analysis, measure.name)
        one = () if value is None else (value,)
        return _rows_table(value if isinstance(value, tuple) else one, record)

    table.__doc__ = record.__doc__
    return table


_OF_ROWS: Final = {
    name: _of_rows(measure, measure.rows) for name, measure in MEASURES.items() if measure.rows
}

OF_ANALYSIS: Final[dict[str, Callable[[Analyzed], pa.Table]]] = {
    "messages": messages_table,
    "collectives": collectives_table,
    "tensors": _OF_ROWS["tensors"],
    "steps": _OF_ROWS["steps"],
    "ranks": _OF_ROWS["ranks"],
    "rank_steps": rank_steps_table,
    "critical_path": path_table,
    "kernels": kernels_table,
    "operators": operators_table,
    "launches": _OF_ROWS["launches"],
    "streams": _OF_ROWS["streams"],
    "copies": _OF_ROWS["copies"],
} | _OF_ROWS
"""Name -> function that creates the table from an analysis."""

OF_TRACE: Final[dict[str, Callable[[Trace], pa.Table]]] = {
    "counters": counters_table,
    "nccl_events": nccl_events_table,
    "hta_queue_length": hta_queue_length_table,
    "hta_copy_bandwidth": hta_copy_bandwidth_table,
}
"""Name -> function that creates the table from a trace, without an analysis."""


def columns_of(table: str, analyzed: Analyzed) -> list[str]:
    """The columns of a table of `OF_ANALYSIS`, without rows of pieces of paths and operations."""
    few = replace(analyzed, paths={}, executions=no_executions())
    names: list[str] = OF_ANALYSIS[table](few).column_names
    return names


TABLES: Final = ("events", *OF_TRACE, *OF_ANALYSIS)
"""The tables that a statement can read."""


def _rows_table(rows: Sequence[Any], kind: type) -> pa.Table:
    if not rows:
        return pa.table({field.name: pa.nulls(0) for field in fields(kind)})
    return pa.Table.from_pylist([flat_row(row) for row in rows])


def _known(values: IntArray, null: int = NULL) -> pa.Array:
    return pa.array(values.astype(np.int64), mask=values == null)


def _us(nanoseconds: IntArray, known: BoolArray) -> pa.Array:
    return pa.array(nanoseconds / 1e3, mask=~known)


def _coded(codes: IntArray, values: list[str]) -> pa.Array:
    indices = pa.array(codes.astype(np.int32), mask=codes == NULL)
    return pa.DictionaryArray.from_arrays(indices, pa.array(values, pa.string()))
