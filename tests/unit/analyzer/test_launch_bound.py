"""Jobs whose device idles between launches, and jobs whose host does something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace

STEPS = 3


def _analysis(
    path: Path,
    *,
    kernels: int,
    gap_us: int,
    pause_us: int = 0,
    synchronizations: int = 0,
    phases: bool = True,
) -> Analysis:
    """Steps with kernels of 10 us, each launched when the one before has long ended.

    Args:
        path: Where the file is written.
        kernels: In a step.
        gap_us: Time of the host for each.
        pause_us: Time of the host at the end of a step, beside all phases.
        synchronizations: Calls that wait for the device, in a step.
        phases: Whether a span of the forward pass is recorded.
    """
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, ts: int, dur: int, tid: int = 1, **args: int) -> None:
        events.append(
            {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    work = kernels * gap_us
    for step in range(STEPS):
        begin = step * (work + pause_us)
        add(f"ProfilerStep#{step}", "user_annotation", begin, work + pause_us)
        if phases:
            add("DistributedDataParallel.forward", "user_annotation", begin, work)
        for kernel in range(kernels):
            at, number = begin + kernel * gap_us, step * kernels + kernel + 1
            add("cudaLaunchKernel", "cuda_runtime", at + gap_us - 25, 5, correlation=number)
            add("relu", "kernel", at + gap_us - 10, 10, 7, stream=7, correlation=number)
        for call in range(synchronizations):
            add("cudaStreamSynchronize", "cuda_runtime", begin + work + call, 1)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return open_trace(path).analyze()


def _host(analysis: Analysis) -> Finding:
    return next(finding for finding in analysis.findings if finding.kind == "host")


@pytest.mark.parametrize("phases", [True, False])
def test_a_launch_bound_job_is_told_so(tmp_path: Path, phases: bool) -> None:
    analysis = _analysis(tmp_path / "rank0.json", kernels=200, gap_us=100, phases=phases)
    gaps = analysis.launch_gaps
    assert gaps is not None
    assert gaps.launches == 200
    assert gaps.launches_per_s == pytest.approx(10_000)
    assert gaps.gap_us == 200 * 90
    assert gaps.gap_share == pytest.approx(0.9)
    assert gaps.gap_share_of_host == pytest.approx(1)
    assert gaps.in_phase_share_of_host == pytest.approx(1 if phases else 0)
    found = _host(analysis)
    assert found.evidence.startswith("the job is launch-bound")
    assert "outside of" not in found.evidence
    assert "200 kernels" in found.evidence
    assert "CUDA graphs" in found.advice
    assert ".item()" not in found.advice


def test_synchronizations_are_named_where_they_are(tmp_path: Path) -> None:
    found = _host(
        _analysis(tmp_path / "rank0.json", kernels=200, gap_us=100, pause_us=50, synchronizations=3)
    )
    assert "CUDA graphs" in found.advice
    assert ".item()" in found.advice
    assert found.advice.endswith("in 3.0 calls a step, the host waits for the device")


def test_a_long_pause_of_the_host_is_not_launch_bound(tmp_path: Path) -> None:
    analysis = _analysis(tmp_path / "rank0.json", kernels=200, gap_us=30, pause_us=20_000)
    gaps = analysis.launch_gaps
    assert gaps is not None
    assert gaps.gap_us == pytest.approx(200 * 20, rel=0.01)
    found = _host(analysis)
    assert "launch-bound" not in found.evidence
    assert "between steps" in found.advice
    assert ".item()" not in found.advice


def test_few_launches_do_not_bind_a_job(tmp_path: Path) -> None:
    found = _host(_analysis(tmp_path / "rank0.json", kernels=5, gap_us=500))
    assert "launch-bound" not in found.evidence
    assert "inside forward" in found.evidence
