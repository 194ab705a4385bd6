"""Ascend's profiles: kernels, collectives and the sums that the file itself states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltrace.analyzer.open_trace import open_trace

EPOCH_US = 1_773_285_899_000_000
STEPS = 4


def profile(path: Path, *, communication: str, late_us: int = 0) -> None:
    """Writes a rank's file; its collective overlaps 1 ms of 3 with compute."""
    processes = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: communication}
    processes[5] = "Overlap Analysis"
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in processes.items()
    ]

    def add(
        name: str, track: tuple[int, int], at: int, dur: int, args: dict[str, object] | None = None
    ) -> None:
        pid, tid = track
        event = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": f"{EPOCH_US + at}.5"}
        category = {"cat": "user_annotation"} if pid == 1 else {}
        events.append(event | {"dur": dur, "args": args or {}} | category)

    for step in range(STEPS):
        at = 10_000 * step
        add(f"ProfilerStep#{step}", (1, 9), at, 10_000)
        add("MatMulV2", (3, 2), at + 500, 6500, {"Task Type": "AI_CORE", "Stream Id": 2})
        start = at + 6000 + late_us
        sizes = {"count": 1_000_000, "data_type": "FP32"}
        add(f"hcom_allReduce__503_{step}_1", (4, 3), start, at + 9000 - start, sizes)
        add("Memcpy", (4, 4), start, 2900 - late_us, {"size(Byte)": 4_000_000})
        add("Computing", (5, 0), at + 500, 6500)
        add("Communication", (5, 1), start, at + 9000 - start)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(events))


@pytest.mark.parametrize("communication", ["Communication", "HCCL"])
def test_work_of_devices_and_collectives(tmp_path: Path, communication: str) -> None:
    for rank in range(2):
        folder = tmp_path / f"host_{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        profile(folder / "trace_view.json", communication=communication, late_us=500 * rank)
    analysis = open_trace(tmp_path).analyze()
    assert [row.wall_us for row in analysis.steps] == [10_000] * STEPS
    first = analysis.ranks[0]
    assert (first.compute_us, first.comm_us) == (6500 * STEPS, 3000 * STEPS)
    assert first.overlap_us == 1000 * STEPS
    [row] = analysis.collectives
    assert (row.op, row.bytes, row.count) == ("all_reduce", 4_000_000, STEPS)
    assert row.arrival_skew_us == 500
    assert {kernel.name for kernel in analysis.kernels} == {"MatMulV2", "hcom_allReduce_"}
