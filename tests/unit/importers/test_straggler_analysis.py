"""StragglerAnalysis's Parquet files, and the slowdown by stragglers computed from them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

import ddltrace
from ddltrace.analyzer.measures.ideal_job import IdealJob
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.cli import cli as command_line
from ddltrace.tracer.errors import TraceError

ROOT = Path(__file__).resolve().parents[3]

# S, launch slowdown, M_W and M_S in result-*.json, mw-*.json and ms-*.json of the repository
# ByteDance-Seed/StragglerAnalysis, and of S_t the largest.
PUBLISHED = {
    "AR": (1.97304509, 1.00675066, 1.00170128, -0.00121196, "backward-compute", 1.58050621),
    "SE": (1.53736137, 1.00512231, 0.02506227, 0.68771089, "backward-compute", 1.41277061),
    "ST": (1.17870218, 1.01921618, 0.03140427, 1.21935638, "forward-compute", 1.08749897),
}

Spans = dict[str, list[tuple[float, float]]]
"""Type of operation -> start and end of each, seconds from the start of the step."""


def rows_of(spans: Spans, *, rank: int, replica: int, stage: int, step: int) -> list[dict]:
    """The rows of one worker in one step."""
    return [
        {
            "dp_rank": replica,
            "stage": stage,
            "rank": rank,
            "step": step,
            "optype": name,
            "start_ts": start,
            "duration": end - start,
            "seq_id": number,
            "mc": 0 if name.endswith(("compute", "gather", "scatter")) else -1,
            "mb_id": number if name.endswith("compute") else -1,
            "gmc": stage if name.endswith("compute") else -1,
        }
        for name, times in spans.items()
        for number, (start, end) in enumerate(times)
    ]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(list(rows))
    column = table.schema.get_field_index("optype")
    coded = table.set_column(column, "optype", table["optype"].dictionary_encode())
    parquet.write_table(coded, path)
    return path


def slowdown(path: Path) -> IdealJob:
    found = ddltrace.open(path).analyze().ideal_job
    assert found is not None
    return found


def two_replicas(forward: tuple[float, float] = (0.1, 0.3)) -> list[dict[str, Any]]:
    """Replicas that differ in the time of forward; both wait in the reduce-scatter."""
    rows = []
    for step in (3, 4, 9):
        last = 0.25 + max(forward)
        for rank, own in enumerate(forward):
            spans = {
                "params-all-gather": [(0.0, 0.05)],
                "forward-compute": [(0.05, 0.05 + own)],
                "backward-compute": [(0.05 + own, 0.25 + own)],
                "grads-reduce-scatter": [(0.25 + own, last + 0.1)],
                "optimizer": [(last + 0.1, last + 0.12)],
            }
            rows += rows_of(spans, rank=rank, replica=rank, stage=0, step=step)
    return rows


def two_stages() -> list[dict[str, Any]]:
    """Two microbatches (1F1B) on stages that compute 1 s and 3 s; transfers take no time."""
    first: Spans = {
        "forward-compute": [(0, 1), (1, 2)],
        "backward-compute": [(7, 8), (13, 14)],
        "forward-send": [(1, 1), (2, 4)],
        "backward-recv": [(2, 7), (8, 13)],
        "optimizer-clip-main-grad": [(14, 14)],
        "optimizer": [(14, 14)],
    }
    last: Spans = {
        "forward-compute": [(1, 4), (7, 10)],
        "backward-compute": [(4, 7), (10, 13)],
        "forward-recv": [(0, 1), (4, 4)],
        "backward-send": [(7, 7), (13, 13)],
        "optimizer-clip-main-grad": [(13, 14)],
        "optimizer": [(14, 14)],
    }
    return [
        *rows_of(first, rank=0, replica=0, stage=0, step=0),
        *rows_of(last, rank=1, replica=0, stage=1, step=0),
    ]


def test_slow_replica(tmp_path: Path) -> None:
    found = slowdown(write(tmp_path / "job.parquet", two_replicas()))
    # Recorded 0.05 + 0.3 + 0.2 + 0.1 + 0.02 s; ideal with forward of (0.1 + 0.3) / 2 s.
    slow = 0.67 / 0.57
    assert found.slowdown == pytest.approx(slow)
    assert (found.step_us, found.replayed_us) == pytest.approx((0.67e6, 0.67e6))
    assert found.ideal_us == pytest.approx(0.57e6)
    assert found.discrepancy == pytest.approx(1)
    by_name = {row.name: row.slowdown for row in found.operations}
    assert by_name.pop("forward-compute") == pytest.approx(slow)
    assert list(by_name.values()) == pytest.approx([1.0] * 4)
    assert [row.slowdown for row in found.replicas] == pytest.approx([1.0, slow])
    assert [row.slowdown for row in found.stages] == pytest.approx([slow])
    assert [(row.rank, row.replica, row.stage) for row in found.workers] == [(1, 1, 0), (0, 0, 0)]
    assert [row.slowdown for row in found.workers] == pytest.approx([slow, 1.0])
    assert found.slowest_ranks == (1,)
    assert found.m_w == pytest.approx(1)
    assert found.m_s == pytest.approx(1)
    assert [(row.step, row.slowdown) for row in found.steps] == [
        (step, pytest.approx(slow)) for step in (3, 4, 9)
    ]


def three_replicas() -> list[dict[str, Any]]:
    """Rank 0 is 0.3 s late; rank 1 waits for it where nothing is recorded, rank 2 in a message."""
    rows = []
    for step in range(3):
        for rank, (own, begins) in enumerate([(0.4, 0.65), (0.1, 0.649), (0.1, 0.35)]):
            spans = {
                "params-all-gather": [(0.0, 0.05)],
                "forward-compute": [(0.05, 0.05 + own)],
                "backward-compute": [(0.05 + own, 0.25 + own)],
                "grads-reduce-scatter": [(begins, 0.75)],
                "optimizer": [(0.75, 0.77)],
            }
            rows += rows_of(spans, rank=rank, replica=rank, stage=0, step=step)
    return rows


def test_unrecorded_time_is_waiting(tmp_path: Path) -> None:
    """Root causes, savings and advice agree with the ideal job although ranks wait unrecorded."""
    analysis = ddltrace.open(write(tmp_path / "job.parquet", three_replicas())).analyze()
    assert analysis.ideal_job is not None
    assert analysis.savings is not None
    cause = analysis.root_causes[0]
    assert (cause.rank, cause.activity, cause.name) == (0, "compute", "forward-compute")
    assert cause.saves_us == pytest.approx(0.3e6)
    assert analysis.savings.compute_us == pytest.approx(0.6e6)
    assert {c.activity for c in analysis.root_causes} <= {"compute", "transfer", "unrecorded"}
    lost = analysis.ideal_job.replayed_us - analysis.ideal_job.ideal_us
    (finding,) = [one for one in analysis.findings if one.kind == "straggler"]
    assert finding.saves_us == pytest.approx(lost)
    assert "what slows rank 0" in finding.advice
    by_rank = {row.rank: row for row in analysis.idle}
    assert by_rank[1].host_us == pytest.approx(0)
    assert by_rank[1].unknown_us == pytest.approx(3 * 0.299e6)
    assert any("nothing is recorded: it counts as waiting" in n for n in analysis.trace.notes)
    # Without bytes, nothing is said of sizes.
    assert not any(" B " in f"{one.evidence} {one.advice}" for one in analysis.findings)


def test_slow_last_stage(tmp_path: Path) -> None:
    path = write(tmp_path / "job.parquet", two_stages())
    found = slowdown(path)
    # With 2 s on both stages, the step takes 12 s; with 2 s on the last stage only, 10 s; with 2 s
    # on the first stage only, 16 s.
    assert (found.replayed_us, found.ideal_us) == pytest.approx((14e6, 12e6))
    assert [row.slowdown for row in found.stages] == pytest.approx([10 / 12, 16 / 12])
    assert [row.slowdown for row in found.replicas] == pytest.approx([14 / 12])
    assert {row.rank: row.slowdown for row in found.workers} == pytest.approx(
        {0: 10 / 12, 1: 14 / 12}
    )
    assert found.m_s == pytest.approx(2)
    assert found.m_w == pytest.approx(2)
    text = render_report(ddltrace.open(path).analyze())
    assert "Stragglers slow the job by 16.7 %: all of this would be gone if" in text.replace(
        "\n", " "
    )
    assert "Straggler slowdown S = 1.167" in text


def test_events(tmp_path: Path) -> None:
    trace = ddltrace.open(write(tmp_path / "job.parquet", two_stages()))
    analysis = trace.analyze()
    assert (analysis.trace.source, analysis.trace.steps) == ("straggler-analysis", 1)
    assert [row.compute_us for row in analysis.ranks] == pytest.approx([4e6, 12e6])
    assert {(row.src, row.dst): row.count for row in analysis.p2p} == {(0, 1): 2, (1, 0): 2}
    assert analysis.steps[0].wall_us == pytest.approx(14e6)
    assert not analysis.joining.p2p_unmatched
    assert [row.ranks for row in analysis.pipelines] == [(0, 1)]


def test_steps_are_chosen_and_kept(tmp_path: Path) -> None:
    """An import keeps what the figures need, and `--steps` counts some steps only."""
    source = write(tmp_path / "job.parquet", two_replicas())
    runner = CliRunner()
    done = runner.invoke(command_line, ["import", str(source), "-o", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    command = ["analyze", str(tmp_path / "kept"), "--json", "--steps", "4:10"]
    found = json.loads(runner.invoke(command_line, command).stdout)["ideal_job"]
    assert found["slowdown"] == pytest.approx(0.67 / 0.57)
    assert [row["step"] for row in found["steps"]] == [4, 9]


def test_incomplete_steps_are_left_out(tmp_path: Path) -> None:
    rows = two_replicas()
    lost = next(r for r in rows if (r["step"], r["optype"]) == (4, "backward-compute"))
    analysis = ddltrace.open(
        write(tmp_path / "job.parquet", [row for row in rows if row is not lost])
    ).analyze()
    assert analysis.ideal_job is not None
    assert [row.step for row in analysis.ideal_job.steps] == [3, 9]
    assert any("1 of 3 steps has other operations" in note for note in analysis.trace.notes)


def test_missing_worker(tmp_path: Path) -> None:
    rows = [row | {"dp_rank": 2 * row["dp_rank"]} for row in two_replicas()]
    analysis = ddltrace.open(write(tmp_path / "job.parquet", rows)).analyze()
    assert analysis.ideal_job is None
    assert any("2 of 3 workers are recorded" in note for note in analysis.trace.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration": -0.5}, "duration has a value that is not a time"),
        ({"duration": float("nan")}, "duration has a value that is not a time"),
        ({"start_ts": 1e300}, "start_ts has a value that is not a time"),
        ({"rank": -1}, "rank has a value beyond"),
        ({"stage": None}, "column stage is not of whole numbers"),
        ({"rank": 7}, "a rank has several places"),
        ({"seq_id": 0, "optype": "optimizer"}, "are there twice"),
    ],
)
def test_damaged(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = two_replicas()
    rows[1] |= change
    with pytest.raises(TraceError, match=message):
        ddltrace.open(write(tmp_path / "job.parquet", rows))


def test_memory_is_limited_by_the_size_of_the_file(tmp_path: Path) -> None:
    """Equal rows take nearly no space in a file."""
    path = write(tmp_path / "job.parquet", two_stages()[:1] * 50_000)
    table = parquet.read_table(path)
    with parquet.ParquetWriter(path, table.schema) as writer:
        for _ in range(30):
            writer.write_table(table)
    with pytest.raises(TraceError, match="more than the limit of 256 MB"):
        ddltrace.open(path)


def test_changed_bytes_are_no_traceback(tmp_path: Path) -> None:
    """One of these makes the number of names in the file zero."""
    path = write(tmp_path / "job.parquet", two_stages())
    parquet.write_table(parquet.read_table(path), path, compression="none")
    content = path.read_bytes()
    first_name = content.index(b"forward-compute")
    # The head of the names' page, which counts them, and what stands before it.
    for place in range(first_name - 50, first_name):
        path.write_bytes(content[:place] + b"\0" + content[place + 1 :])
        with contextlib.suppress(TraceError):
            ddltrace.open(path)


def test_other_parquet_files(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="it has no column dp_rank"):
        ddltrace.open(path)
    path.write_bytes(write(tmp_path / "job.parquet", two_stages()).read_bytes()[:-20])
    with pytest.raises(TraceError, match="is damaged"):
        ddltrace.open(path)
    with pytest.raises(TraceError, match="name one file"):
        ddltrace.open(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    """The public traces give the figures that their authors publish with them."""
    path = ROOT.parent / "shared" / "data" / "straggler-analysis" / f"trace-{name}.parquet"
    if not path.is_file():
        pytest.skip(f"no public traces: {path} does not exist")
    found = slowdown(path)
    figures = (found.slowdown, found.discrepancy, found.m_w, found.m_s)
    *expected, operation, largest = PUBLISHED[name]
    assert figures == pytest.approx(expected, abs=2e-6)
    assert found.operations[0].name == operation
    assert found.operations[0].slowdown == pytest.approx(largest, abs=2e-6)


def test_the_page_shows_the_slowdown(tmp_path: Path) -> None:
    path = write(tmp_path / "job.parquet", two_stages())
    page = tmp_path / "report.html"
    done = CliRunner().invoke(command_line, ["analyze", str(path), "--html", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "Straggler slowdown" in text
    assert "S = 1.167" in text
    assert 'id="slow-workers"' in text
