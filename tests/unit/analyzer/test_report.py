"""The terminal report, thresholds, comparison and SQL, through the commands that show them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from ddltrace.analyzer.commands import analyze, compare, query
from ddltrace.analyzer.compare.mean_difference import RunValues, difference_interval
from ddltrace.analyzer.formatting.text_table import columns_of, render
from ddltrace.analyzer.query.result_tables import EventStream
from ddltrace.analyzer.query.sql import run_query
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.tracer.errors import DdltraceError, ThresholdError, UsageError

HOSTILE = "\x1b[31mred\u202e<b>"


def _training(built, *, steps=12, slow=0.0, name="net"):
    weight = built.tensor(f"{name}.weight", 1 << 20)
    random = np.random.default_rng(1)
    begin = [0.0] * built.world_size
    for number in range(steps):
        length = 50 + random.normal(0, 1) + slow
        for rank in range(built.world_size):
            one, start = built[rank], 200.0 * number
            one.step = number
            one.add("phase", start, start + length, name="forward")
            one.add("layer", start, start + length, name=name)
            one.add("gradient", start + length, start + length, tensors=[weight])
            done = start + length + 30
            message = one.message(
                "all_reduce", start + length, done, seq=number, bytes=1 << 20, tensors=[weight]
            )
            one.wait(start + length, done, message)
            one.whole_step(number, begin[rank], done + 10)
            begin[rank] = done + 10
    return built


def _run(command, *arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result


def test_the_report_begins_with_three_sentences_and_fits(build):
    lines = render_report(_training(build(2)).trace().analyze()).splitlines()
    assert lines[0].startswith("A step takes ")
    text = " ".join(lines[:6])
    assert "To try (saves at most " in text
    assert max(map(columns_of, lines)) <= 100


SAMPLES = sorted(
    path.parent for path in (Path(__file__).parents[3] / "sample_traces").rglob("run.json")
)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_the_first_screen_holds_verdict_changes_and_next_command(sample, tmp_path):
    shutil.copytree(sample, tmp_path / sample.name)  # without the cache of another analysis
    environment = {"COLUMNS": "80"}
    shown = CliRunner(env=environment).invoke(analyze, [str(tmp_path / sample.name)])
    lines = shown.stdout.splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("A step takes ")
    assert [line[:2] for line in lines if re.match(r"\d\. ", line)] == ["1.", "2.", "3."]
    assert lines[-2:-1] == ["All tables: the same command with --full"]
    assert lines[-1].startswith("Next: ddltrace dashboard ")
    path = str(tmp_path)
    for width in (60, 80, 120):
        for options in ([], ["--full"]):
            shown = CliRunner(env={"COLUMNS": str(width)}).invoke(
                analyze, [str(tmp_path / sample.name), *options]
            )
            assert shown.exit_code == 0, shown.output
            lines = [line for line in shown.stdout.splitlines() if path not in line]
            assert max(map(columns_of, lines)) <= width


def test_a_terminal_gets_colors_unless_they_are_refused(build):
    path = _training(build(2)).write()
    shown = {}
    for refused in ("", "1"):
        leader, follower = pty.openpty()
        command = [sys.executable, "-m", "ddltrace", "analyze", str(path), "--full"]
        environment = os.environ | {"NO_COLOR": refused}
        with subprocess.Popen(command, stdout=follower, env=environment):
            os.close(follower)
            shown[refused] = _all_of(leader)
    assert "\x1b[1m" in shown[""]
    assert "\x1b" not in shown["1"]
    assert re.sub(r"\x1b\[\d*m", "", shown[""]) == shown["1"]


def _all_of(terminal: int) -> str:
    """What is printed to a terminal until its last program ends."""
    found = b""
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while part := stream.read(65536):
            found += part
    return found.decode()


def test_a_wide_table_is_split_and_loses_nothing():
    header = ["operation", "group", *(f"<column {number}>" for number in range(12))]
    rows = [
        ["all_reduce " * 4, "0", *(f"<{line}.{number} ms>" for number in range(12))]
        for line in range(3)
    ]
    lines = render(header, rows, 60, keys=2)
    assert max(map(columns_of, lines)) <= 60
    assert len(lines) % (len(rows) + 1) == 0
    assert sum("operation" in line and "group" in line for line in lines) == len(lines) // 4
    for cells in [header, *rows]:
        assert all(sum(cell in line for line in lines) == 1 for cell in cells[2:])
    assert len(render(header[:4], [row[:4] for row in rows], 60, keys=2)) == len(rows) + 1


def test_names_of_strangers_do_not_act(build):
    report = render_report(_training(build(1), name=HOSTILE * 50).trace().analyze())
    assert "\x1b" not in report
    assert "\u202e" not in report
    assert max(map(columns_of, report.splitlines())) <= 100


def test_a_hang_leads_the_report(build):
    built = _training(build(2))
    built[0].message("barrier", 5000, None, seq=99)
    built[1].add("data", 4000, 6000, name="next batch")
    first = render_report(built.trace().analyze()).splitlines()[0]
    assert first.startswith("barrier number 99 of group 0 hangs: rank 0 entered it")
    assert "rank 1 never did" in first


def test_analyze_prints_json_that_parses(build):
    result = _run(analyze, _training(build(2)).write(), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["summary"]["steps"] == 11


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("compute_share<0.99", ThresholdError),
        ("step_us.p50 > 1", ThresholdError),
        ("compute_share>0.99", None),
        ("nonsense", UsageError),
        ("no_such_key<1", UsageError),
        ("steps<1e", UsageError),
    ],
)
def test_fail_on_fails_when_its_expression_holds(build, expression, error):
    result = _run(analyze, _training(build(2)).write(), "--fail-on", expression)
    if error is None:
        assert result.exit_code == 0
    else:
        assert type(result.exception) is error
    if error is not UsageError:
        assert "A step takes" in result.stdout


def test_fail_on_a_number_that_the_trace_lacks_is_an_error_only_if_strict(build):
    path = build(1).write()
    result = _run(analyze, path, "--fail-on", "overlap_ratio<0.6")
    assert result.exit_code == 0
    assert "not known, the trace does not give overlap_ratio" in result.stderr
    result = _run(analyze, path, "--fail-on", "overlap_ratio<0.6", "--strict")
    assert type(result.exception) is DdltraceError


@pytest.mark.parametrize("steps", ["3", "5:2", "a:b", ":", "-1:3"])
def test_steps_are_a_range(build, steps):
    result = _run(analyze, _training(build(1)).write(), f"--steps={steps}")
    assert (result.exit_code == 0) == (steps == ":")


def test_html_into_a_missing_folder_fails_before_the_work(build, tmp_path):
    result = _run(analyze, tmp_path / "no-trace", "--html", tmp_path / "no" / "x.html")
    assert isinstance(result.exception, UsageError)


def test_a_change_is_told_from_noise(build):
    def runs(name, slow):
        return [_training(build(2, f"{name}{n}"), slow=slow).write() for n in range(3)]

    same, again, slower = runs("a", 0.0), runs("b", 0.0), runs("c", 80.0)
    text = " ".join(_run(compare, *same, "--with", *again).stdout.split())
    assert "no difference of the steps stands out from noise" in text
    assert "is ruled out" in text
    value = json.loads(_run(compare, *same, "--with", *slower, "--json").stdout)
    assert value["schema"] == "ddltrace.comparison/1"
    assert value["step_us"]["verdict"] == "same"  # steps are of fixed length here
    parts = {row["name"]: row for row in value["critical_path"]}
    assert parts["compute"]["verdict"] == "more"
    assert parts["compute"]["low"] <= 80.0 <= parts["compute"]["high"]
    assert parts["transfer"]["verdict"] == "same"
    assert value["tensors"]
    assert {row["verdict"] for row in value["tensors"]} == {"same"}
    assert all(row["low"] <= row["change"] <= row["high"] for row in value["tensors"])
    assert "95% interval" in _run(compare, *same, "--with", *slower).stdout


def test_intervals_hold_possible_values_only(build):
    """Equal runs differ by far more than the small parts of a step take."""
    first, second = (_training(build(1, name)).write() for name in "ab")
    value = json.loads(_run(compare, first, second, "--json").stdout)
    rows = [value["step_us"], *value["critical_path"], *value["tensors"], *value["shares"]]
    known = [row for row in rows if row["low"] is not None]
    assert any(row["low"] == -row["before"] for row in known)
    assert all(row["before"] + row["low"] >= -1e-9 for row in known)
    assert all(row["before"] + row["high"] <= 1 + 1e-9 for row in value["shares"])


def test_one_run_a_side_decides_only_beyond_the_noise_of_a_busy_machine(build):
    """These traces have no counters, so the machine may have been busy."""
    first = _training(build(1, "a")).write()
    value = json.loads(
        _run(compare, first, _training(build(1, "b"), slow=100.0).write(), "--json").stdout
    )
    assert value["noise"]["condition"] == "busy"
    assert {row["verdict"] for row in value["critical_path"]} == {"unknown"}
    text = _run(compare, first, first).stdout
    assert "Trace each job at least three times" in " ".join(text.split())
    assert "95% interval" not in text


def test_few_steps_say_that_they_are_few(build):
    first = _training(build(1, "a"), steps=3).write()
    second = _training(build(1, "b"), steps=3, slow=9.0).write()
    assert "too few steps" in " ".join(_run(compare, first, second).stdout.split())


def _interval(before, after, noise=0.0):
    """The interval of runs that are given by their steps."""
    sides = [[RunValues(float(run.mean()), run) for run in side] for side in (before, after)]
    return difference_interval(sides[0], sides[1], noise)


@pytest.mark.parametrize("alike", [0.0, 0.6])
@pytest.mark.parametrize("steps", [5, 8, 20, 100])
def test_noise_of_steps_is_seldom_called_a_change(steps, alike):
    """However few the steps, and though a slow step is seldom alone."""
    random = np.random.default_rng(3)
    called = covered = 0
    for _ in range(400):
        before, after = (_noise(random, steps, alike) for _ in range(2))
        low, high = _interval([before], [after])
        called += low > 0 or high < 0
        low, high = _interval([before], [after + 2])
        covered += low <= 2 <= high
    assert called <= 36  # 5 % would be 20
    assert covered == 400 - called


def _noise(random, count, alike):
    values = random.normal(10, 1, count + 50)
    for i in range(1, len(values)):
        values[i] += alike * (values[i - 1] - 10)
    return values[50:]


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_noise_of_runs_is_seldom_called_a_change(noise):
    """The steps of a run are all alike, and each run is slower or faster as a whole."""
    random = np.random.default_rng(5)

    def side(count, scale=1.0):
        return [np.full(9, scale * (1 + noise * random.normal())) for _ in range(count)]

    called = found = 0
    for _ in range(400):
        low, high = _interval(side(3), side(3), 0.08)
        called += low > 0 or high < 0
        low, _ = _interval(side(3), side(3, 1.1), 0.08)
        found += low > 0
    assert called <= 28  # 5 % would be 20
    if noise < 0.1:
        assert found >= 320


def test_published_noise_and_steps_widen_the_interval_of_one_run():
    one, other = [np.full(9, 10.0)], [np.full(9, 11.0)]
    assert _interval(one, other) == (1.0, 1.0)
    assert _interval(one, other, 0.5) == (0.5, 1.5)
    assert _interval(2 * one, 2 * other, 0.5) == pytest.approx((1 - 0.5 / 2**0.5, 1 + 0.5 / 2**0.5))
    # The spread of one side stands for both: three runs against one.
    runs = [np.full(9, value) for value in (9.0, 10.0, 11.0)]
    assert _interval(runs, other) == pytest.approx(
        (1 - 4.303 * (4 / 3) ** 0.5, 1 + 4.303 * (4 / 3) ** 0.5)
    )


def test_a_true_change_is_found():
    random = np.random.default_rng(4)
    found = 0
    for _ in range(100):
        before, after = random.normal(10, 1, 20), random.normal(12, 1, 20)
        low, _ = _interval([before], [after])
        found += low > 0
    assert found >= 95
    assert _interval([np.full(4, 2.0)], [np.full(9, 3.0)]) is None


@pytest.fixture
def duckdb():
    return pytest.importorskip("duckdb")


def test_sql_over_every_table(build, duckdb):
    path = _training(build(2)).write()
    from ddltrace.analyzer.query.result_tables import TABLES

    # This trace has no counters and no single operators; tests of counters and of imported
    # profiles have them.
    without = {"counters", "kernels", "operators", "launches", "streams", "copies"}
    without |= {"hta_queue_length", "hta_copy_bandwidth", "nccl_events", "all_to_all", "roles"}
    without |= {"connections"}
    for table in TABLES:
        result = _run(query, path, f"SELECT count(*) AS n FROM {table}", "--format", "json")
        assert (json.loads(result.stdout)[0]["n"] > 0) == (table not in without), table
    sql = "SELECT op, count(*) AS n, sum(bytes) AS b FROM messages GROUP BY op"
    assert _run(query, path, sql, "--format", "csv").stdout == "op,n,b\nall_reduce,24,25165824\n"
    assert "all_reduce" in _run(query, path, sql).stdout
    pivoted = "PIVOT (SELECT op, bytes FROM messages) ON op USING count(*)"
    assert "all_reduce" in _run(query, path, pivoted).stdout


def test_sql_goes_through_the_events_of_one_rank_after_the_other(build, duckdb):
    built = build(3)
    for rank in range(3):
        for number in range(rank + 1):
            built[rank].add("layer", number, number + 1, name=f"layer {rank}")
    trace = built.trace()
    held: list[int] = []
    read = trace.events
    trace.events = lambda rank: held.append(rank) or read(rank)
    sql = (
        "SELECT a.name, count(*) AS n, min(b.n) AS same FROM events a "
        "JOIN (SELECT rank, count(*) AS n FROM events GROUP BY rank) b USING (rank) "
        "GROUP BY a.name ORDER BY a.name"
    )
    rows = run_query(trace, sql).to_pylist()
    # Each rank has words of its own for the same code, and the statement reads them twice.
    assert rows == [{"name": f"layer {r}", "n": r + 1, "same": r + 1} for r in range(3)]
    held.clear()
    stream = pa.RecordBatchReader.from_stream(EventStream(trace))
    assert held == []
    stream.read_next_batch()
    assert held == [0]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO 'out.csv'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELECT * FROM trace",
        "SELEC 1",
        "SELECT 1; SELECT 2",
        "CREATE TABLE t AS SELECT 1",
        "PRAGMA database_list",
        "",
    ],
)
def test_sql_reads_nothing_else_and_fails_in_one_line(build, duckdb, sql):
    result = _run(query, build(1).write(), sql)
    assert isinstance(result.exception, UsageError)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("sql", "known"),
    [
        ("SELECT nothing FROM messages", ["columns of messages: rank, op, group,"]),
        ("SELECT e.no FROM events e JOIN steps s USING (step)", ["events: rank,", "; of steps: "]),
        ("SELECT * FROM nothing", ["tables: events, counters, nccl_events,", ", messages,"]),
    ],
)
def test_sql_that_asks_for_what_is_not_there_is_told_what_is(build, duckdb, sql, known):
    error = str(_run(query, build(1).write(), sql).exception)
    assert all(part in error for part in known), error


def test_a_table_keeps_its_width_with_wide_letters():
    lines = render(["name", "n"], [["漢字" * 40, "1"], ["e\u0301" * 90, "2"]], 40)
    assert max(map(columns_of, lines)) <= 40
