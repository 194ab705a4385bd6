"""What is kept of an experiment, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltrace.experiments.harness.file_names import RESULTS_FILE
from ddltrace.experiments.harness.results import Results, Row, Run, combine, summarize
from ddltrace.experiments.harness.results_file import load, write
from ddltrace.experiments.harness.results_table import choice_lines, render
from ddltrace.tracer.errors import TraceError

SETTINGS = {
    "workload": "digits",
    "width": 32,
    "ranks": 2,
    "steps": 30,
    "warmup": 10,
    "hosts": None,
    "bandwidth": None,
    "gradient_bytes": 1_166_248,
}


def row(name: str, step_us: float, **more: object) -> Row:
    walls = [step_us * (1 + 0.001 * (k % 5)) for k in range(20)]
    values: dict[str, object] = {
        "strategy": name,
        "trace": name,
        "step_us": walls,
        "step_us_p50": walls[2],
        "step_us_p95": walls[4],
        "overlap_ratio": 0.5,
        "exposed_us": 1000.0,
        "payload_bytes": 1.0,
        "messages": 14.0,
        "wire_bytes": 1e6,
        "train_loss": 0.35,
        "test_accuracy": 0.9,
    }
    return Row(**{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def results() -> Results:
    rows = [row("ddp", 10_000.0), row("wfbp", 8_000.0), row("fifo", 12_000.0)]
    return Results(settings=SETTINGS, rows=rows, baseline="ddp", status="complete")


def test_written_results_are_read_back(results: Results, tmp_path: Path) -> None:
    write(results, tmp_path)
    assert load(tmp_path) == results
    written = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert written["schema"] == "ddltrace.experiment/1"
    assert [r["difference"] and r["difference"]["relative"] for r in written["rows"]] == [
        None,
        pytest.approx(-0.2),
        pytest.approx(0.2),
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v.update(schema="other/1"),
        lambda v: v.pop("rows"),
        lambda v: v["rows"][0].update(step_us=["x"]),
        lambda v: v["rows"][0].update(step_us=7),
        lambda v: v["rows"][0].update(step_us_p50={}),
        lambda v: v["rows"][0].pop("trace"),
        lambda v: v.update(settings=3),
    ],
)
def test_damaged_results_are_refused(results: Results, tmp_path: Path, damage: object) -> None:
    value = results.to_json()
    damage(value)  # type: ignore[operator]
    (tmp_path / RESULTS_FILE).write_text(json.dumps(value))
    with pytest.raises(TraceError, match=RESULTS_FILE):
        load(tmp_path)


def test_what_is_no_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="ddltrace experiment run"):
        load(tmp_path)


def test_table_fits_and_says_the_difference(results: Results) -> None:
    results.rows.append(row("ddp:bucket_mb=0.125" + "x" * 80, 9_999.0, overlap_ratio=None))
    text = render(results)
    assert max(map(len, text.splitlines())) <= 100
    speed = text[text.index("strategy") :].split("\n\n")[0]
    lines = {line.split()[0]: line for line in speed.splitlines()}
    assert "baseline" in lines["ddp"]
    assert "-20.0 %" in lines["wfbp"]
    assert "+20.0 %" in lines["fifo"]
    assert "~" in next(line for name, line in lines.items() if name.startswith("ddp:bucket"))


def test_names_cannot_act_on_the_terminal(results: Results) -> None:
    results.rows.append(row("\x1b[31mred", 1.0, notes=["\x1b[2Jgone"]))
    results.settings = {**SETTINGS, "workload": "\x1b]0;title\x07"}
    assert "\x1b" not in render(results)
    assert "\x07" not in render(results)


def test_rows_of_several_results_are_told_apart(results: Results) -> None:
    other = Results(rows=[row("trace-b", 5_000.0)], status="complete")
    combined = combine([("shaped", results), ("trace-b", other)], None)
    assert [r.strategy for r in combined.rows] == [
        "shaped/ddp",
        "shaped/wfbp",
        "shaped/fifo",
        "trace-b",
    ]
    assert combined.baseline == "shaped/ddp"
    assert combine([("shaped", results)], "fifo").baseline == "fifo"
    with pytest.raises(TraceError, match="there are: ddp, wfbp, fifo"):
        combine([("shaped", results)], "p3")


def test_what_a_strategy_chose_stands_below_the_table() -> None:
    choices = {
        "placement": {"keys": 5, "loads": [300, 100], "skew": 1.5},
        "auto": {
            "hosts": [[0, 1], [2, 3]],
            "racks": [[[0, 1]], [[2, 3]]],
            "choices": [{"from_bytes": 1024, "name": "ring", "cost_us": 12.3}],
        },
    }
    run = Run("auto", step_us=[1.0, 2.0], choices=choices)
    row = summarize("auto", [run])
    assert row.choices == choices
    lines = choice_lines(row)
    assert "skew 1.500" in lines[0]
    assert "2 racks, 2 hosts" in lines[1]
    assert "from 1 KiB ring (12 us)" in lines[1]
    assert lines[0] in " ".join(render(Results(rows=[row])).split())
