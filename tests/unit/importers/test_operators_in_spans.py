"""Operators count as part of the data loading or phase that encloses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
STEP_US = 20_000


class Profile:
    """A Kineto file of one rank, event by event; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, name: str, category: str, ts: int, dur: int, tid: int = 1, **args: int) -> None:
        self.events.append(
            {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    def analyze(self, path: Path) -> Analysis:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return open_trace(path).analyze()


def _step(profile: Profile, number: int, *, device: bool) -> None:
    """A step with 8 ms of data loading, 5 ms of them in nested operators, and a copy after it."""
    begin = number * STEP_US
    profile.add(f"ProfilerStep#{number}", "user_annotation", begin, STEP_US)
    profile.add(LOADER, "user_annotation", begin, 8000)
    profile.add("aten::stack", "cpu_op", begin + 1000, 4000)
    profile.add("aten::cat", "cpu_op", begin + 1500, 3000)
    profile.add("aten::div", "cpu_op", begin + 6000, 1000)
    profile.add("aten::to", "cpu_op", begin + 8000, 2000)
    profile.add("DistributedDataParallel.forward", "user_annotation", begin + 10_000, 4000)
    profile.add("aten::addmm", "cpu_op", begin + 11_000, 2000)
    if device:
        number = 2 * number + 1
        profile.add("cudaMemcpyAsync", "cuda_runtime", begin + 8100, 10, correlation=number)
        profile.add(
            *("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", begin + 8500, 1000, 7),
            stream=7, correlation=number,
        )  # fmt: skip
        profile.add("cudaLaunchKernel", "cuda_runtime", begin + 11_100, 10, correlation=number + 1)
        profile.add("gemm", "kernel", begin + 12_000, 6000, 7, stream=7, correlation=number + 1)


@pytest.mark.parametrize("device", [True, False])
def test_operators_of_a_data_loader_are_data_loading(tmp_path: Path, device: bool) -> None:
    profile = Profile()
    for number in range(3):
        _step(profile, number, device=device)
    analysis = profile.analyze(tmp_path / "rank0.json")
    rows = [row.critical_path for row in analysis.steps]
    assert [row.data_us for row in rows] == [8000.0] * 3
    if device:
        assert analysis.summary.idle.data_share == pytest.approx(8000 / STEP_US)
    names = {part.name for part in analysis.critical_path if part.category == "data"}
    assert names == {LOADER}
    # The copy to the device after the fetch is none.
    assert [row.copy_us for row in rows] == [1000.0 if device else 0.0] * 3
    assert any("num_workers" in finding.advice for finding in analysis.findings)


def test_operators_of_a_forward_pass_compute_on_the_cpu(tmp_path: Path) -> None:
    profile = Profile()
    for number in range(3):
        _step(profile, number, device=False)
    analysis = profile.analyze(tmp_path / "rank0.json")
    assert [row.critical_path.compute_us for row in analysis.steps] == [4000.0] * 3
    parts = {part.name: part.us for part in analysis.critical_path if part.category == "compute"}
    assert parts == {"DistributedDataParallel.forward": 2000.0, "aten::addmm": 2000.0}


def test_operators_outside_of_any_span_are_host_code(tmp_path: Path) -> None:
    profile = Profile()
    for number in range(3):
        profile.add(f"ProfilerStep#{number}", "user_annotation", number * 1000, 1000)
        profile.add("aten::sum", "cpu_op", number * 1000 + 200, 500)
    analysis = profile.analyze(tmp_path / "rank0.json")
    assert [row.critical_path.host_us for row in analysis.steps] == [1000.0] * 3
