"""Overlap and breakdown by HTA's definitions equal HTA's own figures."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ddltrace.analyzer.commands import analyze
from ddltrace.analyzer.exchange_commands import import_
from ddltrace.analyzer.measures.hta_definitions import hta_breakdown
from ddltrace.analyzer.trace.opened_trace import open_trace
from ddltrace.tracer.errors import UsageError

# Computed with HTA 0.5.0 on the DLRM files.
REFERENCE = {
    0: (4.50, 6419, 1034, 13009),
    1: (2.47, 6428, 1246, 18749),
    2: (7.88, 7046, 1068, 11350),
    3: (3.31, 8145, 1240, 18853),
    4: (0.56, 8887, 1126, 16589),
    5: (0.64, 9121, 1041, 16392),
    6: (7.56, 7051, 1051, 11410),
    7: (9.51, 8308, 1059, 10967),
}


def figures(path: Path) -> dict[int, tuple[float, float, float, float]]:
    return {
        each.rank: (
            round(each.overlap_percent or 0, 2),
            each.idle_us,
            each.compute_us,
            each.kernel_time_us,
        )
        for each in hta_breakdown(open_trace(path))
    }


def hta_figures(folder: Path) -> dict[int, tuple[float, float, float, float]]:
    """What HTA itself computes."""
    logging.getLogger("hta").setLevel(logging.ERROR)
    analysis = pytest.importorskip("hta.trace_analysis").TraceAnalysis(trace_dir=str(folder))
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    return {
        int(rank): (
            float(overlap.loc[rank, "comp_comm_overlap_pctg"]),
            float(breakdown.loc[rank, "idle_time(us)"]),
            float(breakdown.loc[rank, "compute_time(us)"]),
            float(breakdown.loc[rank, "kernel_time(us)"]),
        )
        for rank in overlap.index
    }


def write_steps(folder: Path, *, fractional: bool, seed: int) -> Path:
    """Hand-made files of two ranks with several steps, overlaps, copies and syncs."""
    choice = random.Random(seed)
    folder.mkdir()
    for rank in range(2):
        events: list[dict[str, Any]] = []
        number = 0
        for step in range(4):
            begin = 1000 * step + 50
            events.append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": f"ProfilerStep#{step}",
                    "pid": 9,
                    "tid": 9,
                    "ts": begin,
                    "dur": 1000,
                }
            )
            for _ in range(30):
                number += 1
                launch = begin + choice.uniform(0, 900)
                ts, dur = launch + choice.uniform(1, 400), choice.uniform(0.2, 60)
                if not fractional:
                    launch, ts, dur = round(launch), round(ts), round(dur)
                name, category, stream = choice.choice(
                    [
                        ("gemm", "kernel", 7),
                        ("elementwise_kernel", "kernel", 7),
                        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(a)", "kernel", 20),
                        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 13),
                        ("Stream Sync", "cuda_sync", 7),
                    ]
                )
                link = {"correlation": 1_000_000 + number}
                for event in (
                    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 1},
                    {"cat": category, "name": name, "ts": ts, "dur": dur},
                ):
                    on_device = event["cat"] != "cuda_runtime"
                    events.append(
                        {
                            "ph": "X",
                            "pid": rank if on_device else 9,
                            "tid": stream if on_device else 9,
                            **event,
                            "ts": round(float(event["ts"]), 3) if fractional else event["ts"],
                            "dur": round(float(event["dur"]), 3) if fractional else event["dur"],
                            "args": {**link, "stream": stream} if on_device else link,
                        }
                    )
        text = json.dumps(
            {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}, indent=1
        )
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return folder


def test_reference_values(dlrm: Path) -> None:
    found = figures(dlrm)
    assert found.keys() == REFERENCE.keys()
    for rank, expected in REFERENCE.items():
        assert found[rank] == pytest.approx(expected, rel=1e-3), rank


def test_equal_to_hta_on_a_real_job(dlrm: Path) -> None:
    pytest.importorskip("hta", reason="HolisticTraceAnalysis is not installed beside")
    expected = hta_figures(dlrm)
    for rank, found in figures(dlrm).items():
        assert found == pytest.approx(expected[rank], rel=1e-3), rank


@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_hta_on_several_steps(tmp_path: Path, fractional: bool, seed: int) -> None:
    pytest.importorskip("hta", reason="HolisticTraceAnalysis is not installed beside")
    folder = write_steps(tmp_path / "job", fractional=fractional, seed=seed)
    expected = hta_figures(folder)
    for rank, found in figures(folder).items():
        assert found == pytest.approx(expected[rank], rel=1e-3), rank


def test_last_of_several_steps_is_dropped(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=False, seed=0)
    for _, _, compute, kernel_time in figures(folder).values():
        assert 0 < compute < kernel_time
        # Work launched in the first three of four steps of 1000 microseconds, begun at most
        # 400 behind its launch.
        assert kernel_time <= 3 * 1000 + 400 + 60


def test_rounding_inwards_by_hand(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 10.4, "dur": 5.2},  # 11 to 15
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 13.0, "dur": 7.9},  # 13 to 20
        {"cat": "kernel", "name": "gemm", "ts": 30.9, "dur": 2.0},  # 31 to 32
    ]
    rows = [
        {"ph": "X", "pid": 0, "tid": 7, "args": {"stream": 7, "correlation": number}, **event}
        for number, event in enumerate(events)
    ]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": rows}))
    [(overlap, idle, compute, kernel_time)] = figures(file).values()
    assert (idle, compute, kernel_time) == (11, 5, 21)
    assert overlap == pytest.approx(100 * 2 / 7, abs=0.01)


def test_a_job_without_a_gpu_has_no_breakdown(foreign: Path) -> None:
    assert hta_breakdown(open_trace(foreign / "kineto-cpu")) == []


def run_analyze(*arguments: object) -> Result:
    return CliRunner().invoke(analyze, [str(argument) for argument in arguments])


def ranks_of(result: Result) -> dict[int, tuple[float | None, ...]]:
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    return {
        row["rank"]: tuple(
            row[key] for key in ("overlap_ratio", "idle_us", "compute_us", "span_us")
        )
        for row in document["ranks"]
    }


@pytest.mark.parametrize("definitions", ["ddltrace", "hta"])
def test_both_definitions_agree_where_there_is_one_step(dlrm: Path, definitions: str) -> None:
    result = run_analyze(dlrm, "--json", "--definitions", definitions)
    assert json.loads(result.stdout)["definitions"] == definitions
    found = ranks_of(result)
    for rank, (overlap, *others) in REFERENCE.items():
        expected = (overlap / 100, *others)
        assert found[rank] == pytest.approx(expected, rel=1e-3, abs=5e-5), rank


def test_command_gives_hta_values_where_they_differ(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=False, seed=0)
    expected = figures(folder)
    found = ranks_of(run_analyze(folder, "--json", "--definitions", "hta"))
    ours = ranks_of(run_analyze(folder, "--json"))
    for rank, (overlap, idle, compute, kernel_time) in expected.items():
        assert found[rank] == pytest.approx((overlap / 100, idle, compute, kernel_time), abs=5e-5)
        assert ours[rank][3] > found[rank][3], "ours keep the last step"
    report = run_analyze(folder, "--definitions", "hta").stdout
    table = report.partition("by the definitions of HTA")[2].splitlines()[2:4]
    assert [line.split() for line in table] == [
        [str(rank), f"{o:.2f}", *(f"{value:.0f}" for value in others)]
        for rank, (o, *others) in expected.items()
    ]


def test_imported_trace_keeps_hta_values(tmp_path: Path) -> None:
    folder = write_steps(tmp_path / "job", fractional=True, seed=1)
    target = tmp_path / "imported"
    done = CliRunner().invoke(import_, [str(folder), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert figures(target) == figures(folder)


def test_without_device_work_there_are_no_values(foreign: Path) -> None:
    found = ranks_of(run_analyze(foreign / "kineto-cpu", "--json", "--definitions", "hta"))
    assert set(found.values()) == {(None, None, None, None)}
    report = run_analyze(foreign / "kineto-cpu", "--definitions", "hta").stdout
    assert "no rank has device work" in report


def test_other_traces_and_chosen_steps_are_refused(foreign: Path) -> None:
    native = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"
    with pytest.raises(UsageError, match="leave out --definitions hta"):
        hta_breakdown(open_trace(native))
    result = run_analyze(foreign / "kineto-cpu", "--definitions", "hta", "--steps", "0:2")
    assert result.exit_code != 0
    assert "leave out --steps" in result.output + str(result.exception)
