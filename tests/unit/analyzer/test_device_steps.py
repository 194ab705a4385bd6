"""Steps on the device's time, of jobs whose host runs ahead of the device and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report.notes import notes_of
from ddltrace.analyzer.report.text_report import render_report

WALL_US, PERIOD_US = 10_000, 12_000


def _analysis(path: Path, *, lag_us: int) -> Analysis:
    """Four steps: 8 ms of compute and 5 ms of communication, 1 ms of it at the same time.

    Args:
        path: Where the file is written.
        lag_us: From the launch of a step's first work to its begin, in the first step. Before,
            the device runs work whose launch was not recorded.
    """
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, ts: int, dur: int, tid: int = 1, **args: int) -> None:
        events.append(
            {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    if lag_us > WALL_US:
        add("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 0, 9000, 8, stream=8)
    for step in range(4):
        begin, number = step * WALL_US, 2 * step + 1
        add(f"ProfilerStep#{step}", "user_annotation", begin, WALL_US)
        add("cudaLaunchKernel", "cuda_runtime", begin + 100, 5, correlation=number)
        add("cudaLaunchKernel", "cuda_runtime", begin + 200, 5, correlation=number + 1)
        on_device = 100 + lag_us + step * (PERIOD_US if lag_us > WALL_US else WALL_US)
        add("gemm", "kernel", on_device, 8000, 7, stream=7, correlation=number)
        add(
            *("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", on_device + 7000, 5000, 8),
            stream=8, correlation=number + 1,
        )  # fmt: skip
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return open_trace(path).analyze()


def test_work_counts_in_the_step_that_launched_it(tmp_path: Path) -> None:
    analysis = _analysis(tmp_path / "rank0.json", lag_us=15_000)
    rows = analysis.device_steps
    assert [row.step for row in rows] == [0, 1, 2, 3]
    assert [row.lag_us for row in rows] == [15_000, 17_000, 19_000, 21_000]
    assert [row.period_us for row in rows] == [PERIOD_US, PERIOD_US, PERIOD_US, None]
    # The message without a recorded launch is of none of them.
    assert {(row.compute_us, row.comm_us, row.overlap_us) for row in rows} == {(8000, 5000, 1000)}
    [note] = [note for note in notes_of(analysis) if "runs ahead" in note]
    assert "10.0 ms on the host (median) and 12.0 ms on the device (mean)" in note
    assert "launches 5.00 ms of communication" in note
    assert "Steps on the device (" in render_report(analysis)


def test_a_device_that_follows_its_host_is_not_mentioned(tmp_path: Path) -> None:
    analysis = _analysis(tmp_path / "rank0.json", lag_us=50)
    assert [row.lag_us for row in analysis.device_steps] == [50] * 4
    assert not any("runs ahead" in note for note in notes_of(analysis))
    assert "Steps on the device's time" not in render_report(analysis)
