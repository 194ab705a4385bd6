"""The report of an experiment: everything in one file, nothing invented, names that cannot act."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddltrace.experiments.harness import figures
from ddltrace.experiments.harness.html_report import render, write_html
from ddltrace.experiments.harness.measurement import measure
from ddltrace.experiments.harness.results import Results, Run, summarize
from ddltrace.experiments.harness.step_timeline import median_step_timeline

SAMPLES = Path(__file__).resolve().parents[3] / "sample_traces"
TRACE = "ddp-4-hosts-400mbit"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run() -> Run:
    outcome = {"losses": [3 - step / 20 for step in range(40)], "wire_bytes_per_step": [2e6]}
    return replace(measure(SAMPLES / TRACE, steps=range(10, 40), outcome=outcome), trace=TRACE)


@pytest.fixture(scope="module")
def results(run: Run) -> Results:
    slower = replace(run, step_us=[1.5 * wall for wall in run.step_us])
    failed = Run("topk", status="failed", reason=HOSTILE)
    return Results(
        settings={"workload": "digits", "steps": 40, "warmup": 10, "target_loss": 2.0},
        rows=[
            summarize("ddp:bucket_mb=1", [run, replace(run, round=2)], target_loss=2.0),
            summarize("fifo", [slower, replace(slower, round=2)], target_loss=2.0, paced=True),
            summarize(HOSTILE, [replace(run, trace=None)]),
            summarize("topk", [failed]),
        ],
        baseline="ddp:bucket_mb=1",
        status="failed",
    )


def drawn(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])["figures"]
    return value


def test_one_file_holds_every_row_and_plot(results: Results, tmp_path: Path) -> None:
    write_html(results, tmp_path / "report.html", SAMPLES)
    text = (tmp_path / "report.html").read_text()
    assert set(drawn(text)) == {"step_times", "bytes_per_step", "loss_over_time", "step_timelines"}
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:)?//""", text.partition('id="plotly"')[0]
    )
    for words in ("fifo (paced)", "tuned DDP: ddp:bucket_mb=1", "topk failed"):
        assert words in text
    assert HOSTILE not in text.replace("\\u003c", "<")
    assert "&lt;script&gt;alert(1)" in text


def test_bars_are_the_rows_step_times(results: Results) -> None:
    figure = figures.step_times(results)
    assert figure is not None
    bars = {name: x for bar in figure.data for name, x in zip(bar.y, bar.x, strict=True)}
    assert bars["ddp:bucket_mb=1"] == pytest.approx(results.rows[0].step_us_p50 / 1e3)
    assert bars["fifo (paced)"] == pytest.approx(1.5 * bars["ddp:bucket_mb=1"])
    assert "topk" not in bars
    verdict = {name: bar.name for bar in figure.data for name in bar.y}
    assert verdict["fifo (paced)"] == "slower than tuned DDP"


def test_a_timeline_holds_the_steps_phases_and_messages(run: Run) -> None:
    step = median_step_timeline(run, SAMPLES)
    assert step is not None
    assert step.step >= 10
    assert {bar.role for bar in step.bars} == {
        "forward",
        "backward",
        "update",
        "wait",
        "collective",
    }
    sent = {bar.name for bar in step.bars if bar.role == "collective"}
    assert sent >= {"bucket 0", "bucket 1", "bucket 2"}
    for bar in step.bars:
        assert bar.start_ms >= 0
        assert bar.start_ms + bar.ms <= step.wall_ms + 1e-9
    assert median_step_timeline(replace(run, trace="gone"), SAMPLES) is None


def test_tokens_by_expert_are_drawn() -> None:
    tokens, dropped = [[[5, 1], [2, 4]], [[3, 3], [6, 0]]], [[[2, 0], [0, 1]], [[0, 0], [3, 0]]]
    experts = {"dropped_share": 0.25, "imbalance": 1.5, "tokens": tokens, "dropped": dropped}
    runs = [
        Run("expert:capacity=1", choices={"experts": experts}),
        Run("expert", choices={"experts": experts | {"dropped_share": 0.0}}),
        Run("ddp"),
    ]
    results = Results(rows=[summarize(run.strategy, [run]) for run in runs])
    text = render(results, None)
    assert set(drawn(text)) == {"tokens_by_expert"}
    assert "25.00 % of the tokens were dropped; the rank whose experts had most had 1.50" in text
    assert "expert: no token was dropped" in text
    figure = figures.tokens_by_expert(results)
    assert figure is not None
    (cells,) = figure.data
    names = [f"block {block} · expert {expert}" for block in (0, 1) for expert in (0, 1)]
    assert list(cells.x) == names
    rows = [f"{run.strategy} · rank {rank}" for run in runs[:2] for rank in (0, 1)]
    assert list(cells.y) == rows
    assert [list(row) for row in cells.z] == 2 * [[5, 1, 3, 3], [2, 4, 6, 0]]
    assert list(cells.text[0]) == ["5 (2 dropped)", "1", "3", "3"]


def test_nothing_is_drawn_of_nothing() -> None:
    empty = Results(rows=[summarize("fifo", [Run("fifo", status="failed", reason="x")])])
    text = render(empty, None)
    assert drawn(text) == {}
    assert "fifo failed" in text
