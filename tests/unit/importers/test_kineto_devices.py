"""Kineto files with lost kernels, other devices, events without a time, and two libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.imported import ImportedTrace


def interval(name: str, category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": 9, "tid": 9, "ts": ts, "dur": dur} | {
        "args": args
    }


def launched(number: int, ts: float, *, kernel: bool = True) -> list[dict[str, Any]]:
    call = interval("cudaLaunchKernel", "cuda_runtime", ts, 2, correlation=number)
    work = interval("gemm", "kernel", ts + 5, 8, correlation=number, stream=7)
    return [call, work] if kernel else [call]


def read(path: Path, events: list[dict[str, Any]]) -> ImportedTrace:
    head: dict[str, Any] = {"rank": 0, "world_size": 1, "backend": "nccl"}
    head["pg_config"] = [{"pg_name": "0", "backend_config": "nccl", "ranks": [0]}]
    file = {"schemaVersion": 1, "distributedInfo": head, "traceEvents": events}
    path.write_text(json.dumps(file))
    return formats.read(path)


def kinds(trace: ImportedTrace) -> dict[str, int]:
    [table] = trace.tables.values()
    counted = pc.value_counts(table["kind"].cast("string"))
    return {entry["values"]: entry["counts"] for entry in counted.to_pylist()}


@pytest.mark.parametrize(
    ("with_kernel", "lost"),
    [
        ([True, True, True, True], 0),
        ([False, True, False, True], 2),
        ([True, True, False, False], 0),  # they may have run after the recording
        ([False] * 4, 4),
    ],
)
def test_lost_kernels_are_told(tmp_path: Path, with_kernel: list[bool], lost: int) -> None:
    events = [
        event
        for number, kernel in enumerate(with_kernel)
        for event in launched(number, 1000 + 100 * number, kernel=kernel)
    ]
    trace = read(tmp_path / "a.json", events)
    told = [note for note in trace.run.notes if "launches are missing" in note]
    assert [note.split(" launches")[0] for note in told] == (
        [f"the kernels of {lost} of 4"] if lost else []
    )
    assert trace.run.status == ("partial" if lost else "complete")


def test_messages_between_hosts_in_a_job_on_devices(tmp_path: Path) -> None:
    events = launched(1, 1000)
    events.append(interval("gloo:all_reduce", "user_annotation", 1000, 50))
    events.append(interval("nccl:all_reduce", "user_annotation", 1100, 5))
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events.append(interval(name, "kernel", 1200, 30, stream=20))
    trace = read(tmp_path / "a.json", events)
    [table] = trace.tables.values()
    rows = table.filter(pc.equal(table["kind"], "message")).sort_by("start_ns").to_pylist()
    assert [(row["group"], row["op"], row["end_ns"] - row["start_ns"]) for row in rows] == [
        ("gloo", "all_reduce", 50_000),
        ("0", "all_reduce", 30_000),
    ]
    assert any(note.startswith("1 message on the host") for note in trace.run.notes)
    assert {g.name: g.backend for g in trace.run.ranks[0].groups} == {"0": "nccl", "gloo": "gloo"}


def test_work_of_mtia_is_work_of_a_device(tmp_path: Path) -> None:
    events = [
        interval("launch", "mtia_runtime", 1000, 2, correlation=1),
        interval("fc_kernel", "mtia_ccp_events", 1010, 20, correlation=1, stream=3),
    ]
    assert kinds(read(tmp_path / "a.json", events)) == {"host": 1, "kernel": 1}


@pytest.mark.parametrize(
    ("begin", "duration", "left_out"),
    [(1e6, 5, 1), (1e15, 5, 1), (1e15, 1e15, 1), (20, 5, 0), (5e4, 6e4, 0), (1e6, 1.01e6, 0)],
)
def test_an_event_without_a_time(
    tmp_path: Path, begin: float, duration: float, left_out: int
) -> None:
    events = launched(1, begin) + launched(2, begin + 1000)
    events.append(interval("stray", "cpu_op", 0, duration))
    trace = read(tmp_path / "a.json", events)
    assert any("without a usable time" in note for note in trace.run.notes) == bool(left_out)
    assert kinds(trace)["host"] == 3 - left_out
