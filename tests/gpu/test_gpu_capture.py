"""Traces the jobs of benchmarks/gpu.py: their results do not change, their records are right.

Without a CUDA device the same checks run on the CPU, where they can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_checks import Checks, Failed, covered, device_work, gpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checks]:
    dry = not torch.cuda.is_available()
    bench = gpu.Bench(tmp_path / "results", 280, dry=dry)
    _, nccl_ranks = gpu.describe_machine(dry=dry)
    yield Checks(bench, nccl_ranks)
    bench.close()


def assert_no_part_failed(suite: Any) -> None:
    assert [p for p in suite.bench.parts if p["status"] == "failed"] == []
    assert any(p["status"] == "ok" for p in suite.bench.parts)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["cnn", "transformer"])
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", None)])
def test_training_is_recorded_and_not_changed(
    checked: Checks, backend: str, ranks: int | None, model: str
) -> None:
    checked.check_job(backend, ranks or checked.nccl_ranks, model, 6)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_device_times_agree_with_the_profiler_and_nothing_is_synchronized(
    checked: Checks, model: str
) -> None:
    checked.check_against_kineto(model)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
def test_messages_of_nccl_have_the_times_of_their_kernels(checked: Checks) -> None:
    if checked.nccl_ranks < 2:
        pytest.skip("two ranks on one GPU need NCCL 2.30")
    checked.bench.part("messages", checked.messages)
    assert_no_part_failed(checked)
    [part] = checked.bench.parts
    print(json.dumps(part["figures"], indent=1))
    every = part["figures"]["all"]
    assert abs(every["start_median_us"]) < 20
    assert abs(every["end_median_us"]) < 20


@pytest.mark.gpu
@needs_gpu
def test_graphs_can_be_captured(checked: Checks) -> None:
    checked.bench.part("graphs", checked.graphs)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
def test_operators_are_recorded_in_their_window(checked: Checks) -> None:
    checked.bench.part("operators", checked.operators)
    assert_no_part_failed(checked)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests do this on the GPU")
def test_the_checks_work_on_the_cpu(checked: Checks) -> None:
    checked.check_job("gloo", 2, "transformer", 3)
    assert_no_part_failed(checked)
    results = json.loads((checked.bench.output / "results.json").read_text())
    by_name = {p["part"].split(": ")[1]: p for p in results["parts"]}
    assert by_name["gradients sent"]["figures"]["steps"] == 3
    assert by_name["kernels on streams"]["status"] == "skipped"
    assert "gradients sent" in (checked.bench.output / "report.txt").read_text()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on the GPU")
def test_the_benchmark_measures_in_a_dry_run(tmp_path: Path) -> None:
    bench = gpu.Bench(tmp_path, 280, dry=True)
    try:
        gpu.Suite(bench, 1).overhead("gloo", 2, ("untraced", "layer"), 0.01)
    finally:
        bench.close()
    (part,) = bench.parts
    assert part["status"] == "ok", part
    assert {f"{model} layer" for model in gpu.MODELS} <= set(part["figures"])
    assert part["figures"]["host memory layer"]["peak_mib"] > 100
    assert "host memory layer" in gpu.report({"environment": {}, "parts": [part]})


def trace_rows(*kernels: tuple[int, int]) -> list[dict[str, int]]:
    return [{"start_ns": start, "end_ns": end} for start, end in kernels]


def test_coverage_counts_overlapping_intervals_once() -> None:
    work = [(0.0, 10.0, 20.0), (0.0, 30.0, 50.0)]
    assert covered(work, trace_rows((0, 100))) == 1.0
    assert covered(work, trace_rows((10, 20), (12, 18), (15, 35))) == pytest.approx(0.5)
    assert covered(work, trace_rows((60, 70))) == 0.0


def test_kernels_are_found_by_what_launched_them() -> None:
    def event(cat: str, name: str, ts: float, correlation: int) -> dict[str, object]:
        args = {"correlation": correlation}
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 2.0, "args": args}

    events = [
        event("cuda_runtime", "cudaLaunchKernel", 1.0, 7),
        event("kernel", "gemm", 5.0, 7),
        event("cuda_runtime", "cudaLaunchKernel", 2.0, 8),
        event("kernel", "ncclDevKernel_AllReduce", 6.0, 8),
        event("kernel", "launched before the window", 0.0, 6),
    ]
    assert device_work(events, 100.0, dry=False) == [(1100.0, 5100.0, 7100.0)]
    with pytest.raises(Failed):
        device_work([], 0.0, dry=False)
