"""Small honest traces with known answers, written through the tracer's own store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run, write_sidecar
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import STREAM_SUFFIX, segment_name


class RankBuilder:
    """Collects the events of one rank; times are microseconds, for short test code."""

    def __init__(self, rank: int, *, step: int | None = None) -> None:
        self.rank = rank
        self.step = step
        self.rows: list[dict[str, Any]] = []
        self.next_id = 0
        self.info_changes: dict[str, Any] = {}

    def add(self, kind: str, start: float, end: float | None, **columns: Any) -> None:
        row: dict[str, Any] = {
            "kind": kind,
            "start_ns": round(start * 1000),
            "end_ns": None if end is None else round(end * 1000),
            "lane": "main",
            "step": self.step,
        }
        self.rows.append({**row, **columns})

    def message(self, op: str, start: float, end: float | None, **columns: Any) -> int:
        number = self.next_id
        self.next_id += 1
        defaults = {
            "id": number,
            "op": op,
            "group": "0",
            "lane": "comm/0",
            "status": "open" if end is None else "ok",
            "enqueue_ns": round(start * 1000),
            "dtype": "float32",
        }
        self.add("message", start, end, **{**defaults, **columns})
        return number

    def wait(self, start: float, end: float, parent: int | None, **columns: Any) -> None:
        self.add("wait", start, end, **{"parent": parent, "name": "wait", **columns})

    def whole_step(self, number: int, start: float, end: float, **columns: Any) -> None:
        self.add("step", start, end, name="step", **{"step": number, **columns})


class TraceBuilder:
    """Writes a trace directory from what its ranks collected."""

    def __init__(self, path: Path, world_size: int) -> None:
        self.path = path
        self.world_size = world_size
        self.ranks = {rank: RankBuilder(rank) for rank in range(world_size)}
        self.groups = [GroupInfo("0", "default", "gloo", tuple(range(world_size)))]
        self.tensors: list[TensorInfo] = []
        self.notes: list[str] = []

    def __getitem__(self, rank: int) -> RankBuilder:
        return self.ranks[rank]

    def tensor(self, name: str, size: int) -> int:
        number = len(self.tensors)
        self.tensors.append(TensorInfo(number, name, (size // 4,), "float32", size))
        return number

    def write(self, *, final: bool = True) -> Path:
        self.path.mkdir(parents=True)
        for rank, builder in self.ranks.items():
            info = RankInfo(
                rank,
                segment_name(rank=rank, attempt=0, pid=100 + rank),
                world_size=self.world_size,
                host="here",
                clock_domain="boot",
                status="complete",
                groups=self.groups,
                tensors=self.tensors,
                events=len(builder.rows),
            )
            for name, value in builder.info_changes.items():
                setattr(info, name, value)
            write_segment(self.path, info, builder.rows)
        run = RunInfo(notes=self.notes, command=["test"])
        write_run(self.path, run)
        if final:
            finalize(self.path, run)
        return self.path

    def trace(self) -> Trace:
        return open_trace(self.write())


def write_segment(path: Path, info: RankInfo, rows: list[dict[str, Any]]) -> None:
    write_sidecar(path, info)
    writer = StreamWriter(path / (info.segment + STREAM_SUFFIX))
    writer.write(events_batch(rows))
    writer.close()


def events_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = []
    for field in EVENTS:
        values = [row.get(field.name) for row in rows]
        columns.append(
            pa.array(values, pa.string()).dictionary_encode().cast(field.type)
            if pa.types.is_dictionary(field.type)
            else pa.array(values, field.type)
        )
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)


@pytest.fixture
def build(tmp_path: Path):
    """Makes a builder: ``build(world_size)``."""

    def make(world_size: int, name: str = "trace") -> TraceBuilder:
        return TraceBuilder(tmp_path / name, world_size)

    return make


@pytest.fixture(scope="session")
def build_class():
    """The builder's class, for tests that write a trace per example."""
    return TraceBuilder
