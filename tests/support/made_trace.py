"""A small trace with all that an export has to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddltrace.analyzer.importers.imported import Row, table_of
from ddltrace.analyzer.open_trace import Trace
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.trace_files import segment_name

START = 10_000_000
HOSTILE = '=cmd|"\x1b[2J</script>'


def trace_of(rows: Mapping[int, Sequence[Row]], group: str = "", **more: Any) -> Trace:
    """A trace of the rows of each rank, on one host.

    Args:
        group: Description of the group of all ranks.
        more: Further attributes of every rank.
    """
    run, tables = RunInfo(status="complete"), {}
    groups = [GroupInfo("0", group, "gloo", tuple(rows))]
    for rank, own in rows.items():
        segment = segment_name(rank=rank, attempt=0, pid=rank)
        run.ranks.append(
            RankInfo(rank=rank, segment=segment, clock_domain="host", groups=groups, **more)
        )
        tables[segment] = table_of(own)
    return Trace(Path("made-by-hand"), run, tables)


def made_trace() -> Trace:
    """Two ranks: gradients, messages that overlap, a send and its receive, an open message."""
    rows_of = {}
    for rank in range(2):
        pair = {"op": "send", "bytes": 8} if rank == 0 else {"op": "recv", "out_bytes": 8}
        rows = [
            Row(0, 1000, "step", "step", "main", step=0),
            Row(0, 400, "phase", "backward", "main", step=0, phase="backward"),
            Row(0, 300, "layer", HOSTILE, "main", step=0),
            Row(100, 100, "gradient", "layer1.weight", "main", step=0, tensors=(0,)),
            Row(200, 200, "gradient", HOSTILE, "main", step=0, tensors=(1,)),
            message(0, 110, 500, tensors=(0,)),
            message(1, 210, 800, tensors=(1,)),
            # As in most jobs, the receive begins before its send.
            message(2, 850 if rank == 0 else 840, 900, seq=0, peer=1 - rank, tag=0, **pair),
            message(3, 910, None, status="open"),
        ]
        for row in rows:
            row.start_ns += START
            row.end_ns = None if row.end_ns is None else row.end_ns + START
            row.enqueue_ns = None if row.enqueue_ns is None else row.enqueue_ns + START
        rows_of[rank] = rows
    tensors = [
        TensorInfo(0, "layer1.weight", (4,), "float32", 16),
        TensorInfo(1, HOSTILE, (2,), "float32", 8),
    ]
    return trace_of(rows_of, world_size=2, tensors=tensors)


def message(number: int, start: int, end: int | None, **more: Any) -> Row:
    known = {"op": "all_reduce", "seq": number, "bytes": 16, "dtype": "float32", "status": "ok"}
    return Row(
        start,
        end,
        "message",
        f"bucket {number}",
        "comm/0",
        step=0,
        id=number,
        group="0",
        enqueue_ns=start,
        **{**known, **more},
    )
