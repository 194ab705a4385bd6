"""Kernel and operator tables, launches, streams and copies of Kineto files with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddltrace.analyzer.compare.comparison import compare, render_comparison
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.cli import cli

COPY = "Memcpy HtoD (Pinned -> Device)"
# By HTA 0.5.0: sum of idle time by cause of two streams, of all works of rank 0.
HTA_IDLE = {(0, "stream-7"): (11448, 123, 0), (7, "stream-24"): (3936, 12, 0)}


def write(path: Path, batch: int = 1, kernel: str = "gemm") -> Path:
    """Two steps of 1,000 us: a copy, and an operator in an operator that launches two kernels."""
    events: list[dict[str, Any]] = []

    def host(name: str, category: str, ts: int, dur: int, **args: Any) -> None:
        event = {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur}
        events.append(event | {"pid": 1, "tid": 1, "args": args})

    def device(name: str, ts: int, dur: int, number: int, **args: Any) -> None:
        category = "gpu_memcpy" if "Memcpy" in name else "kernel"
        event = {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "pid": 0, "tid": 7}
        events.append(event | {"args": {"stream": 7, "device": 0, "correlation": number, **args}})

    for step in range(2):
        at, number = step * 1000, step * 10
        host(f"ProfilerStep#{step}", "user_annotation", at, 1000)
        host("cudaMemcpyAsync", "cuda_runtime", at + 10, 20, correlation=number)
        device(COPY, at + 40, 10, number, bytes=1000 * batch)
        host("aten::linear", "cpu_op", at + 100, 100)
        host("aten::mm", "cpu_op", at + 110, 50)
        host("cudaLaunchKernel", "cuda_runtime", at + 120, 10, correlation=number + 1)
        device(kernel, at + 140, 40 * batch, number + 1)
        host("cudaLaunchKernel", "cuda_runtime", at + 170, 60 + step, correlation=number + 2)
        device("bias", at + 400, 5, number + 2)
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}))
    return path


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    return open_trace(write(tmp_path / "a.json")).analyze()


def test_kernels_and_operators(analysis: Analysis) -> None:
    kernels = {row.name: row for row in analysis.kernels}
    assert [row.name for row in analysis.kernels] == ["gemm", COPY, "bias"]
    gemm = kernels["gemm"]
    assert (gemm.kind, gemm.count, gemm.total_us, gemm.mean_us) == ("compute", 2, 80.0, 40.0)
    assert (gemm.p95_us, gemm.per_step_us) == (40.0, 40.0)
    assert [(row.rank, row.count, row.total_us) for row in gemm.ranks] == [(0, 2, 80.0)]
    assert kernels[COPY].kind == "copy"
    assert sum(row.share for row in analysis.kernels) == pytest.approx(1)
    operators = {row.name: row for row in analysis.operators}
    linear, mm, launch = (operators[n] for n in ("aten::linear", "aten::mm", "cudaLaunchKernel"))
    # The second launch ends behind the operator in which it begins: it is not a part of it.
    assert (linear.total_us, linear.self_us) == (200.0, 100.0)
    assert (mm.total_us, mm.self_us, mm.device_us, mm.self_device_us) == (100, 80, 80, 80)
    assert (linear.device_us, linear.self_device_us) == (80.0, 0.0)
    assert (launch.kind, launch.count, launch.device_us) == ("runtime", 4, 90.0)
    assert launch.p95_us == pytest.approx(60.85)


def test_launches_streams_and_copies(analysis: Analysis) -> None:
    [launches] = analysis.launches
    assert (launches.launches, launches.slow_calls, launches.long_delays) == (6, 2, 2)
    # Of the calls up to 50 us the one of the copy takes longer than the copy.
    assert launches.short_kernels == 2
    assert launches.delay_us == pytest.approx((10 + 10 + 170 + 10 + 10 + 169) / 6)
    [stream] = analysis.streams
    # Gaps: 90 us launched at 120 after the copy's end at 50; 220 us launched at 170, before the
    # end at 180; then the next step's.
    assert (stream.works, stream.busy_us) == (6, 110.0)
    assert (stream.host_wait_us, stream.kernel_wait_us, stream.other_us) == (815.0, 0.0, 440.0)
    assert stream.queue_max == 1
    [copies] = analysis.copies
    assert (copies.direction, copies.count, copies.bytes) == ("Memcpy HtoD", 2, 2000)
    assert copies.gbps == copies.mean_gbps == pytest.approx(0.8)


def test_tables_in_sql_and_reports(tmp_path: Path, analysis: Analysis) -> None:
    trace = open_trace(write(tmp_path / "b.json"))
    rows = run_query(trace, "SELECT step, name, count, total_us FROM kernels ORDER BY ALL")
    assert rows.to_pylist()[0] == {"step": 0, "name": COPY, "count": 1, "total_us": 10.0}
    assert rows.num_rows == 6
    sql = "SELECT sum(self_us) AS own FROM operators WHERE name = 'aten::mm'"
    assert run_query(trace, sql).to_pylist() == [{"own": 80.0}]
    for table in ("launches", "streams", "copies"):
        assert run_query(trace, f"FROM {table}").num_rows == 1
    text = render_report(analysis)
    assert all(part in text for part in ("gemm", "aten::mm", "Launches of", "Copies", "host wait"))
    assert max(map(len, text.splitlines())) <= 100
    some = trace.analyze(range(1, 2))
    assert {row.name: row.count for row in some.kernels} == {"gemm": 1, COPY: 1, "bias": 1}


def test_other_work_is_told_first(tmp_path: Path, analysis: Analysis) -> None:
    same = compare([analysis], [open_trace(write(tmp_path / "same.json")).analyze()])
    assert same.work.same is True
    assert (same.kernels, same.operators) == ((), ())
    other = open_trace(write(tmp_path / "other.json", batch=3, kernel="gemm_large")).analyze()
    found = compare([analysis], [other])
    assert found.work.same is False
    assert (found.work.appeared, found.work.vanished, found.work.input_bytes_ratio) == (1, 1, 3.0)
    assert {row.name: row.verdict for row in found.kernels} == {
        "gemm": "vanished",
        "gemm_large": "appeared",
    }
    text = render_comparison(found)
    assert text.startswith("The traces do not run the same work")
    assert "3.00 times as many bytes" in " ".join(text.split())
    longer = open_trace(write(tmp_path / "longer.json", batch=3)).analyze()
    [row] = compare([analysis], [longer]).kernels
    assert (row.name, row.verdict, row.change_us) == ("gemm", "duration", 80.0)


def test_idle_time_of_streams_is_hta_s(dlrm: Path) -> None:
    analysis = open_trace(dlrm).analyze()
    streams = {(row.rank, row.stream): row for row in analysis.streams}
    for place, (host, kernel, other) in HTA_IDLE.items():
        row = streams[place]
        assert (row.host_wait_us, row.kernel_wait_us, row.other_us) == (host, kernel, other)
    first = analysis.launches[0]
    assert (first.launches, first.call_us) == (261, pytest.approx(9.038314))
    assert first.delay_us == pytest.approx(60.659004)


def write_shapes(path: Path, batch: int) -> Path:
    """Two steps with a linear layer, whose kernel takes as long whatever the batch size is."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        for name, category, ts, dur, args in (
            (f"ProfilerStep#{step}", "user_annotation", 0, 1000, {}),
            ("aten::linear", "cpu_op", 100, 100, {"Input Dims": [[batch, 3], [4, 3], []]}),
            ("aten::mm", "cpu_op", 110, 50, {"Input Dims": [[batch, 3], [3, 4]]}),
            ("cudaLaunchKernel", "cuda_runtime", 120, 10, {"correlation": step + 1}),
            ("aten::ones", "cpu_op", 300, 10, {"Input Dims": [[], []]}),
        ):
            event = {"ph": "X", "name": name, "cat": category, "ts": step * 1000 + ts, "dur": dur}
            events.append(event | {"pid": 1, "tid": 1, "args": args})
        place = {"stream": 7, "device": 0, "correlation": step + 1}
        kernel = {"ph": "X", "name": "gemm", "cat": "kernel", "ts": step * 1000 + 140, "dur": 40}
        events.append(kernel | {"pid": 0, "tid": 7, "args": place})
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}))
    return path


def test_shapes_of_inputs(tmp_path: Path) -> None:
    trace = open_trace(write_shapes(tmp_path / "a.json", 64))
    analysis = trace.analyze()
    operators = {row.name: row.shapes for row in analysis.operators}
    [mm] = operators["aten::mm"]
    assert (mm.shapes, mm.count, mm.total_us, mm.mean_us) == ("[[64,3],[3,4]]", 2, 100.0, 50.0)
    assert [row.shapes for row in operators["aten::linear"]] == ["[[64,3],[4,3],[]]"]
    assert operators["aten::ones"] == operators["cudaLaunchKernel"] == ()
    # A kernel works on the inputs of the innermost operator that launched it.
    assert [row.shapes for row in analysis.kernels[0].shapes] == ["[[64,3],[3,4]]"]
    assert "[[64,3],[3,4]]" in render_report(analysis)
    sql = "SELECT DISTINCT shapes FROM events WHERE name = 'aten::mm'"
    assert run_query(trace, sql).to_pylist() == [{"shapes": "[[64,3],[3,4]]"}]
    for to in ("out.json", "kept"):
        kept = tmp_path / to
        command = ["export", str(trace.path), "--to", "chrome"] if to == "out.json" else None
        done = CliRunner().invoke(cli, [*(command or ["import", str(trace.path)]), "-o", str(kept)])
        assert done.exit_code == 0, done.output
        again = open_trace(kept).analyze().operators
        assert {row.name: row.shapes for row in again} == operators


def test_another_batch_size_is_told_first(tmp_path: Path) -> None:
    """Also where names, counts and times are the same."""
    sides = [
        open_trace(write_shapes(tmp_path / f"{batch}.json", batch)).analyze() for batch in (64, 32)
    ]
    assert compare(sides[:1], sides[:1]).work.shapes_changed == 0
    found = compare(sides[:1], sides[1:])
    assert found.work.same is False
    assert (found.work.shapes_changed, found.work.first_dimension_ratio) == (2, 0.5)
    rows = {row.name: row for row in found.operators}
    assert rows["aten::mm"].verdict == "shapes"
    assert (rows["aten::mm"].before_shapes, rows["aten::mm"].after_shapes) == (
        "[[64,3],[3,4]]",
        "[[32,3],[3,4]]",
    )
    assert " ".join(render_comparison(found).split()).startswith(
        "The traces do not run the same work, so their times do not compare: 2 operators run on "
        "inputs of other shapes, whose first dimension is 0.50 times as large, as with another "
        "batch size"
    )


def test_long_and_damaged_shapes(tmp_path: Path) -> None:
    path = write_shapes(tmp_path / "a.json", 64)
    text = path.read_text()
    long = json.dumps([[number, 7] for number in range(200)])
    path.write_text(text.replace("[[64, 3], [3, 4]]", long).replace("[[64, 3], [4, 3], []]", '"x"'))
    operators = {row.name: row.shapes for row in open_trace(path).analyze().operators}
    [mm] = operators["aten::mm"]
    assert mm.shapes.startswith("[[0,7],[1,7]")
    assert mm.shapes.endswith("],...]")
    assert len(mm.shapes) < 410
    assert operators["aten::linear"] == ()
