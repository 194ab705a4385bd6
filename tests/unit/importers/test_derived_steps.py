"""Steps of Kineto files without ProfilerStep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from ddltrace.analyzer.importers import formats
from ddltrace.analyzer.importers.imported import ImportedTrace

PERIOD = 1000
NUMBER = 6


def interval(name: str, category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    pid = 0 if category == "kernel" else 9
    head = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": args.get("stream", 9)}
    return {**head, "ts": ts, "dur": dur, "args": args}


def write_job(path: Path, optimizers: list[str], *, layers: int = 3, begin: int = 0) -> Path:
    """Steps of a forward pass, kernels of layers, a backward pass and optimizers' steps."""
    events = []
    for step in range(NUMBER):
        ts = begin + step * PERIOD + 100
        if optimizers:
            events.append(interval("DistributedDataParallel.forward", "user_annotation", ts, 300))
        for number, name in enumerate(["embed", *["norm", "gemm"] * layers, "loss"]):
            key = begin + 100 * step + number
            call = interval("cudaLaunchKernel", "cuda_runtime", ts + 10 * number, 2)
            call["args"] = {"correlation": key}
            at = ts + 10 * number + 5
            events += [call, interval(name, "kernel", at, 8, stream=7, correlation=key)]
        for place, name in enumerate(optimizers):
            events.append(interval(name, "user_annotation", ts + 500 + 100 * place, 50))
    head = {"rank": 0, "world_size": 1}
    path.write_text(
        json.dumps({"schemaVersion": 1, "distributedInfo": head, "traceEvents": events})
    )
    return path


def steps(trace: ImportedTrace) -> list[tuple[int, int, int]]:
    [table] = trace.tables.values()
    rows = table.filter(pc.equal(table["kind"], "step")).to_pylist()
    return [(row["step"], row["start_ns"], row["end_ns"]) for row in rows]


def kernels_a_step(trace: ImportedTrace) -> dict[int | None, int]:
    [table] = trace.tables.values()
    counted = pc.value_counts(table.filter(pc.equal(table["kind"], "kernel"))["step"])
    return {entry["values"]: entry["counts"] for entry in counted.to_pylist()}


def test_optimizers_end_steps(tmp_path: Path) -> None:
    trace = formats.read(write_job(tmp_path / "a.json", ["Optimizer.step#SGD.step"]))
    ends = [1000 * (650 + PERIOD * step) for step in range(NUMBER)]
    assert steps(trace) == list(zip(range(NUMBER), [100_000, *ends[:-1]], ends, strict=True))
    assert kernels_a_step(trace) == dict.fromkeys(range(NUMBER), 8)
    assert any("calls of an optimizer" in note for note in trace.run.notes)
    assert not any("no training steps" in note for note in trace.run.notes)


def test_two_optimizers_make_one_step(tmp_path: Path) -> None:
    optimizers = ["Optimizer.step#SGD.step", "Optimizer.step#Adam.step"]
    for name, chosen in (("two", optimizers), ("same", optimizers[:1] * 2)):
        trace = formats.read(write_job(tmp_path / f"{name}.json", chosen))
        assert [end for _, _, end in steps(trace)] == [
            1000 * (750 + PERIOD * step) for step in range(NUMBER)
        ]


def test_kernels_that_repeat_are_steps(tmp_path: Path) -> None:
    trace = formats.read(write_job(tmp_path / "a.json", []))
    assert steps(trace) == [
        (step, 1000 * (100 + PERIOD * step), 1000 * (1100 + PERIOD * step))
        for step in range(NUMBER - 1)
    ]
    assert any("the repetition of kernels" in note for note in trace.run.notes)


def test_kernels_without_a_period_are_no_steps(tmp_path: Path) -> None:
    events = [
        interval(name, "kernel", 10 * number, 5, stream=7)
        for number, name in enumerate("abacbcbbacabccaabbcacbabacbcabcc")
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    trace = formats.read(path)
    assert steps(trace) == []
    assert any("no training steps" in note for note in trace.run.notes)


def test_windows_number_on(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for number in range(2):
        write_job(folder / f"w{number}.json", ["Optimizer.step#SGD.step"], begin=number * 10_000)
    assert [step for step, _, _ in steps(formats.read(folder))] == list(range(2 * NUMBER))
