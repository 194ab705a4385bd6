"""The events of a predicted job, as those of a recorded one.

What ranks did beside messages is what the trace holds, at the times that the replay gives it: an
instant between two items is moved as the items are. Messages and waits are the replay's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import FloatArray, IntArray
from ddltrace.analyzer.importers.imported import ImportedTrace, Row, table_of
from ddltrace.analyzer.whatif.costs import bytes_on_link
from ddltrace.analyzer.whatif.program import SIGNAL, WAIT, Exchange, Program
from ddltrace.analyzer.whatif.questions import Refused
from ddltrace.analyzer.whatif.replay import Replayed
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import segment_name

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

SOURCE: Final = "ddltrace whatif"

_NOT_KEPT: Final = ("message", "wait")


def predicted_trace(
    trace: Trace, program: Program, replayed: Replayed, question: str
) -> ImportedTrace:
    """Makes the trace of a replay.

    Args:
        trace: The trace that was replayed.
        program: What was replayed.
        replayed: Its outcome, with the times of items.
        question: In words, for a note.

    Raises:
        Refused: The job sends from one rank to another: who sends is not in the program.
    """
    if any(exchange.op == "send" for exchange in program.exchanges):
        raise Refused("a job with sends and receives is answered, but not written as a trace")
    names = {tensor.id: tensor.name for tensor in trace.tensors(trace.ranks[0])}
    run = deepcopy(trace.run)
    run.source, run.status = SOURCE, "complete"
    run.notes = [f"not recorded: predicted from {trace.name}, {question}"]
    run.ranks, run.ended_unix_ns = [], None
    recorded = list(trace.ranks)
    begin = min(int(items.begin[0]) for items in program.items)
    rows = _message_rows(program, replayed, names, begin)
    tables = {}
    for place, rank in enumerate(program.ranks):
        info = deepcopy(trace.infos(recorded[place % len(recorded)])[-1])
        kept = _kept(trace.events(info.rank), program, replayed, place, begin)
        mine = rows[place] + _wait_rows(program, replayed, place, begin)
        table = pa.concat_tables([kept, table_of(mine)]).combine_chunks()
        table = table.unify_dictionaries().sort_by("start_ns")
        info.rank, info.world_size = rank, len(program.ranks)
        info.segment = segment_name(rank=rank, attempt=0, pid=0)
        info.host = program.hosts[place]
        # All times are on rank 0's clock.
        info.clock_domain = "predicted"
        info.clock = {"monotonic_ns": begin, "unix_ns": run.created_unix_ns, "samples": []}
        info.counters = info.counters_checksum = info.silence = info.cost = info.ended_ns = None
        info.dropped = info.lost_bytes = info.counters_dropped = 0
        info.events = table.num_rows
        if len(program.ranks) != len(recorded):
            everyone = tuple(program.ranks)
            info.groups = [
                replace(group, ranks=everyone) if len(group.ranks) == len(recorded) else group
                for group in info.groups
            ]
        run.ranks.append(info)
        tables[info.segment] = table
    return ImportedTrace(run, tables)


def _message_rows(
    program: Program, replayed: Replayed, names: Mapping[int, str], begin: int
) -> dict[int, list[Row]]:
    """The messages of each rank.

    Args:
        replayed: Its replay.
        names: Id of a tensor -> its name.
        begin: When the first rank begins, ns.
    """
    group = next((each.group for each in program.exchanges if each.group), "0")
    rows: dict[int, list[Row]] = defaultdict(list)
    for number, exchange in enumerate(program.exchanges):
        arrived, done = replayed.arrived[number], replayed.done[number]
        if arrived is None or done is None or exchange.op == SIGNAL:
            continue
        size = exchange.bytes
        if exchange.link_bytes is not None:  # of the payload, if the operation's own rounds sent it
            of_one = bytes_on_link(exchange.op, len(exchange.places), 1)
            size = round(exchange.link_bytes / of_one) if of_one else 0
        for member, place in enumerate(exchange.places.tolist()):
            rows[place].append(
                Row(
                    start_ns=begin + int(arrived[member]),
                    end_ns=begin + int(done[member]),
                    enqueue_ns=begin + int(replayed.launched[number][member]),
                    kind="message",
                    name=_name(exchange, names),
                    lane=f"comm/{exchange.group or group}",
                    step=int(program.steps[exchange.step]),
                    id=number,
                    op=exchange.op,
                    group=exchange.group or group,
                    seq=number,
                    bytes=size or None,
                    status="ok",
                    tensors=exchange.carried or None,
                )
            )
    return rows


def _name(exchange: Exchange, names: Mapping[int, str]) -> str:
    if len(exchange.carried) == 1:
        return names.get(exchange.carried[0], exchange.op)
    return f"{exchange.op} of {counted(exchange.tensors, 'tensor')}"


def _wait_rows(program: Program, replayed: Replayed, place: int, begin: int) -> list[Row]:
    """The waits of a rank."""
    rows = []
    items, times = program.items[place], replayed.items[place]
    for item in np.flatnonzero((items.kind == WAIT) & (times.after > times.until)).tolist():
        number = int(items.exchange[item])
        rows.append(
            Row(
                start_ns=begin + int(times.until[item]),
                end_ns=begin + int(times.after[item]),
                kind="wait",
                name=program.exchanges[number].op,
                lane="main",
                step=int(program.steps[items.step[item]]),
                parent=number,
            )
        )
    return rows


def _kept(
    events: pa.Table, program: Program, replayed: Replayed, place: int, begin: int
) -> pa.Table:
    """What a rank recorded in the replayed steps beside messages, at its predicted times."""
    step = events["step"]
    inside = pc.and_(
        pc.greater_equal(step, int(program.steps[0])), pc.less_equal(step, int(program.steps[-1]))
    )
    other = pc.invert(pc.is_in(events["kind"].cast(pa.string()), pa.array(_NOT_KEPT)))
    complete = pc.is_valid(events["end_ns"])
    table = events.filter(pc.and_(pc.and_(pc.fill_null(inside, False), other), complete))
    moved = {
        name: begin + _moved(table[name].to_numpy(), program, replayed, place)
        for name in ("start_ns", "end_ns")
    }
    for name, times in moved.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, EVENTS.field(name), pa.array(times, pa.int64()))
    return table


def _moved(instants: IntArray, program: Program, replayed: Replayed, place: int) -> IntArray:
    """Instants of the trace in the replay, ns after the first rank's begin."""
    items, times = program.items[place], replayed.items[place]
    recorded = np.stack([items.begin, items.until], axis=1).ravel().astype(np.float64)
    replay: FloatArray = np.stack([times.begin, times.until], axis=1).ravel()
    known = ~np.isnan(replay)
    recorded = np.maximum.accumulate(recorded[known])
    return np.interp(instants, recorded, replay[known]).astype(np.int64)
