"""Small traces with known contents, written through the store."""

from pathlib import Path

import pyarrow as pa
import pytest

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.trace_files import segment_name

MS = 1_000_000
BASE = 5_000 * MS
LAYERS = ("net.conv", "net.fc")
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e"


def event(start, end, kind, **columns):
    """One row; times in ns from the start of the job."""
    row = dict.fromkeys(EVENTS.names)
    return (
        row
        | {
            "start_ns": BASE + start,
            "end_ns": None if end is None else BASE + end,
            "kind": kind,
            "lane": "main",
        }
        | columns
    )


def rank_events(rank, *, steps=4, step_ms=100, late_ms=10, name_of_marker=HOSTILE):
    """One rank's job: rank 1 computes `late_ms` longer before each all_reduce."""
    rows, length = [], step_ms * MS
    for step in range(steps):
        t = step * length
        late = late_ms * MS if rank == 1 else 0
        common = {"step": step}
        rows += [
            event(t, t + length, "step", name="step", **common),
            event(t, t + 5 * MS, "data", phase="data", name="batch", **common),
            event(t + 5 * MS, t + 30 * MS, "phase", name="forward", phase="forward", **common),
            event(t + 6 * MS, t + 15 * MS, "layer", name=LAYERS[0], phase="forward", **common),
            event(t + 15 * MS, t + 29 * MS, "layer", name=LAYERS[1], phase="forward", **common),
            event(t + 30 * MS, t + 80 * MS, "phase", name="backward", phase="backward", **common),
        ]
        for number in (1, 0):
            ready = t + (40 + 10 * (1 - number)) * MS + late
            rows.append(
                event(ready, ready, "gradient", phase="backward", tensors=[number], **common)
            )
        messages = ((0, 41 * MS + late, 75 * MS, [1]), (1, 51 * MS + late, 78 * MS, [0]))
        for number, start, end, tensors in messages:
            rows.append(
                event(
                    t + start,
                    t + end,
                    "message",
                    lane="comm/0",
                    op="all_reduce",
                    group="0",
                    seq=2 * step + number,
                    id=2 * step + number,
                    bytes=4000 * (number + 1),
                    out_bytes=4000 * (number + 1),
                    dtype="float32",
                    enqueue_ns=BASE + t + start - MS,
                    status="ok",
                    phase="backward",
                    tensors=tensors,
                    **common,
                )
            )
        rows += [
            event(
                t + 60 * MS, t + 78 * MS, "wait", parent=2 * step + 1, phase="backward", **common
            ),
            event(t + 80 * MS, t + 90 * MS, "phase", name="optimizer", **common),
            event(t + 92 * MS, t + 93 * MS, "marker", name=name_of_marker, **common),
        ]
    src, dst = 0, 1
    rows.append(
        event(
            steps * length,
            steps * length + 3 * MS,
            "message",
            lane="comm/0",
            op="send" if rank == src else "recv",
            group="0",
            seq=0,
            tag=0,
            peer=dst if rank == src else src,
            bytes=64 if rank == src else None,
            status="ok",
        )
    )
    rows.append(
        event(
            steps * length + 4 * MS,
            None,
            "message",
            lane="comm/0",
            op="barrier",
            group="0",
            seq=2 * steps,
            status="open",
        )
    )
    return rows


def write_trace(directory: Path, rows_of_rank: dict[int, list[dict]]) -> Path:
    """Writes a finished trace directory."""
    directory.mkdir()
    run = RunInfo(status="complete", command=["train.py", "<b>"], host="here")
    for rank, rows in rows_of_rank.items():
        segment = segment_name(rank=rank, attempt=0, pid=100 + rank)
        table = pa.Table.from_pylist(sorted(rows, key=lambda r: r["end_ns"] or 1 << 60), EVENTS)
        write_events(directory, segment, iter(table.to_batches()))
        run.ranks.append(
            RankInfo(
                rank=rank,
                segment=segment,
                world_size=len(rows_of_rank),
                pid=100 + rank,
                host="here",
                clock_domain="one",
                status="complete",
                events=len(rows),
                tensors=[
                    TensorInfo(0, "net.conv.weight", (10, 100), "float32", 4000),
                    TensorInfo(1, "net.fc.weight", (2000,), "float32", 8000),
                ],
                groups=[GroupInfo("0", "default", "gloo", tuple(rows_of_rank))],
            )
        )
    write_run(directory, run)
    return directory


@pytest.fixture
def write_run_of(tmp_path):
    """Writes a trace of two ranks: its name, and what `rank_events` takes.

    `change` makes other rows of a rank and its rows.
    """

    def write(name, *, change=lambda _, rows: rows, **shape):
        rows = {rank: change(rank, rank_events(rank, **shape)) for rank in (0, 1)}
        return write_trace(tmp_path / name, rows)

    return write


@pytest.fixture
def trace_path(write_run_of):
    return write_run_of("run")


@pytest.fixture
def workspace(trace_path):
    return Workspace([open_trace(trace_path)])


@pytest.fixture
def opened(workspace):
    return workspace.get(0)
