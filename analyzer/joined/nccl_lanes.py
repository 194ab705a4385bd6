"""NCCL's events as rows of schema `EVENTS`, for views: a lane per channel and per proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.importers.imported import Row, table_of
from ddltrace.analyzer.joined.nccl_events import nccl_events
from ddltrace.analyzer.nccl.messages import Ints, is_kind, numbers, parents_in_job
from ddltrace.tracer.nccl.event_kinds import KINDS
from ddltrace.tracer.trace.schema import EVENTS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

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
