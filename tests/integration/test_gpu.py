"""The tracer on a GPU: the checks of `benchmarks/gpu.py`, and that script itself on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ddltrace_benchmarks_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checked(gpu: ModuleType, tmp_path: Path) -> Iterator[ModuleType]:
    dry = not torch.cuda.is_available()
    bench = gpu.Bench(tmp_path / "results", 280, dry=dry)
    _, nccl_ranks = gpu.describe_machine(dry=dry)
    yield gpu.Suite(bench, nccl_ranks)
    bench.close()


def assert_no_part_failed(suite: ModuleType) -> None:
    assert [p for p in suite.bench.parts if p["status"] == "failed"] == []
    assert any(p["status"] == "ok" for p in suite.bench.parts)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["cnn", "transformer"])
@pytest.mark.parametrize(("backend", "ranks"), [("gloo", 2), ("nccl", None)])
def test_training_is_recorded_and_not_changed(
    checked: ModuleType, backend: str, ranks: int | None, model: str
) -> None:
    checked.check_job(backend, ranks or checked.nccl_ranks, model, 6)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_device_times_agree_with_the_profiler_and_nothing_is_synchronized(
    checked: ModuleType, model: str
) -> None:
    checked.check_against_kineto(model)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
def test_graphs_can_be_captured(checked: ModuleType) -> None:
    checked.bench.part("graphs", checked.graphs)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
def test_operators_are_recorded_in_their_window(checked: ModuleType) -> None:
    checked.bench.part("operators", checked.operators)
    assert_no_part_failed(checked)


@pytest.mark.gpu
@needs_gpu
def test_a_step_costs_at_most_one_percent_more_at_layer(checked: ModuleType) -> None:
    checked.overhead("nccl", 1, ("untraced", "layer"), 0.8)
    assert_no_part_failed(checked)
    figures = checked.bench.parts[0]["figures"]
    assert {m: figures[f"{m} layer"]["ratio"] <= 1.01 for m in ("cnn", "transformer")} == {
        "cnn": True,
        "transformer": True,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests do this on the GPU")
def test_the_script_works_but_for_cuda_itself(checked: ModuleType) -> None:
    checked.check_job("gloo", 2, "transformer", 3)
    assert_no_part_failed(checked)
    results = json.loads((checked.bench.output / "results.json").read_text())
    by_name = {p["part"].split(": ")[1]: p for p in results["parts"]}
    assert by_name["gradients sent"]["figures"]["steps"] == 3
    assert by_name["kernels on streams"]["status"] == "skipped"
    assert "gradients sent" in (checked.bench.output / "report.txt").read_text()


def trace_rows(*kernels: tuple[int, int]) -> list[dict[str, int]]:
    return [{"start_ns": start, "end_ns": end} for start, end in kernels]


def test_coverage_counts_overlapping_intervals_once(gpu: ModuleType) -> None:
    work = [(0.0, 10.0, 20.0), (0.0, 30.0, 50.0)]
    assert gpu.covered(work, trace_rows((0, 100))) == 1.0
    assert gpu.covered(work, trace_rows((10, 20), (12, 18), (15, 35))) == pytest.approx(0.5)
    assert gpu.covered(work, trace_rows((60, 70))) == 0.0


def test_kernels_are_found_by_what_launched_them(gpu: ModuleType) -> None:
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
    assert gpu.device_work(events, 100.0, dry=False) == [(1100.0, 5100.0, 7100.0)]
    with pytest.raises(gpu.Failed):
        gpu.device_work([], 0.0, dry=False)
