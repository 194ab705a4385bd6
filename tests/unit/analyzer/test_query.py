"""What a query may do: read its tables, and nothing else, within limits."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from support.made_trace import made_trace
from support.sampling import sampled

from ddltrace.analyzer.commands import query
from ddltrace.analyzer.formatting.quantities import parse_memory_limit
from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.analyzer.query.result_tables import TABLES
from ddltrace.analyzer.query.rows_as_text import rows_as_text
from ddltrace.analyzer.query.sql import QueryLimits, run_query
from ddltrace.analyzer.query.statement_process import RefusedError, check_statement
from ddltrace.tracer.errors import TraceError, UsageError

duckdb: Any = pytest.importorskip("duckdb")
SAMPLE = Path(__file__).resolve().parents[3] / "sample_traces" / "straggler"

REFUSED = {
    "EXPLAIN ANALYZE COPY": "EXPLAIN ANALYZE COPY (SELECT 1) TO '.tmp/out.csv'",
    "EXPLAIN with options": "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '.tmp/out.csv'",
    "EXPLAIN with comments": "/* EXPLAIN */ EXPLAIN -- x\n ANALYZE COPY (SELECT 1) TO '.tmp/o'",
    "EXPLAIN COPY of a PIVOT": "EXPLAIN ANALYZE COPY (PIVOT steps ON step USING sum(step)) TO 'o'",
    "EXPLAIN INSERT": "EXPLAIN ANALYZE INSERT INTO steps SELECT * FROM steps",
    "COPY": "COPY (SELECT 1) TO '.tmp/out.csv'",
    "COPY of a PIVOT": "COPY (PIVOT steps ON step USING sum(wall_us)) TO '.tmp/out.csv'",
    "COPY before a comment": "COPY (PIVOT steps ON step USING sum(wall_us)) TO '.tmp/a'; -- x",
    "CREATE TABLE": "CREATE TABLE mine AS SELECT 1",
    "CREATE of a PIVOT": "CREATE TABLE mine AS PIVOT steps ON step USING sum(wall_us)",
    "CREATE MACRO": "CREATE MACRO mine(a) AS a + 1",
    "CREATE SECRET": "CREATE SECRET mine (TYPE s3)",
    "INSERT": "INSERT INTO steps SELECT * FROM steps",
    "INSERT in WITH": "WITH a AS (INSERT INTO steps VALUES (1) RETURNING *) FROM a",
    "UPDATE": "UPDATE steps SET step = 1",
    "DELETE": "DELETE FROM steps",
    "DROP": "DROP VIEW steps",
    "ALTER": "ALTER TABLE steps ADD COLUMN a INTEGER",
    "ATTACH": "ATTACH '.tmp/other.db'",
    "DETACH": "DETACH memory",
    "USE": "USE memory",
    "SET": "SET memory_limit = '100GB'",
    "RESET": "RESET memory_limit",
    "PRAGMA": "PRAGMA database_list",
    "CALL": "CALL pragma_version()",
    "CHECKPOINT": "CHECKPOINT",
    "INSTALL": "INSTALL httpfs",
    "LOAD": "LOAD httpfs",
    "EXPORT": "EXPORT DATABASE '.tmp'",
    "IMPORT": "IMPORT DATABASE '.tmp'",
    "PREPARE": "PREPARE mine AS SELECT 1",
    "EXECUTE": "EXECUTE mine",
    "BEGIN": "BEGIN TRANSACTION",
    "VACUUM": "VACUUM",
    "two statements": "SELECT 1; SELECT 2",
    "no statement": " -- nothing",
    "a file": "FROM read_csv('.tmp/secret')",
    "a file by name": "FROM '.tmp/secret.csv'",
    "a blob": "FROM read_blob('.tmp/secret')",
    "a folder": "FROM glob('.tmp/*')",
    "the network": "FROM 'https://localhost/a.parquet'",
    "a variable of this process": "FROM limits",
}

SELECTS = (
    "a file",
    "a file by name",
    "a blob",
    "a folder",
    "the network",
    "a variable of this process",
    "INSERT in WITH",
)
"""Those that look like a SELECT: DuckDB refuses them in that process."""


def test_only_a_select_passes_the_check() -> None:
    for kind, sql in REFUSED.items():
        if kind in SELECTS:
            check_statement(sql)
        else:
            with pytest.raises((RefusedError, duckdb.Error)):
                check_statement(sql)


@pytest.mark.parametrize(
    "kind", [*SELECTS, *sampled([kind for kind in REFUSED if kind not in SELECTS], 6)]
)
def test_all_but_a_select_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DuckDB's own folder for temporary files lies here: it may not be used either.
    (tmp_path / ".tmp").mkdir()
    for name in ("secret", "secret.csv"):
        (tmp_path / ".tmp" / name).write_text("a\n1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        run_query(made_trace(), REFUSED[kind])
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".tmp", "secret", "secret.csv"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 AS n",
        "SELECT 1 AS n; -- done",
        "FROM steps",
        "WITH a AS (SELECT * FROM steps) SELECT count(*) FROM a",
        "VALUES (1), (2)",
        "PIVOT steps ON step USING sum(wall_us)",
        "DESCRIBE steps",
        "EXPLAIN SELECT * FROM steps",
        "EXPLAIN ANALYZE SELECT * FROM steps",
        "EXPLAIN (FORMAT json) SELECT * FROM steps",
        "explain (select 1)",
    ],
)
def test_what_returns_rows_is_accepted(sql: str) -> None:
    assert run_query(made_trace(), sql).num_rows > 0


def test_a_long_rank_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = open_trace(SAMPLE)
    sql = "SELECT * FROM events ORDER BY ALL"
    whole = run_query(trace, sql)
    monkeypatch.setattr("ddltrace.analyzer.query.result_tables.MOST_AT_ONCE", 10)
    owner = next(part for part in Trace.__mro__ if "events" in vars(part))
    monkeypatch.delattr(owner, "events")
    assert run_query(trace, sql).to_pylist() == whole.to_pylist()


def test_columns_of_one_name_are_told_apart_by_position(tmp_path: Path) -> None:
    sql = "SELECT 1 AS n, 2 AS n, 3 AS n_1, 4 AS n, 'x\ny' AS t"
    table = run_query(made_trace(), sql)
    assert table.column_names == ["n", "n_2", "n_1", "n_3", "t"]
    assert json.loads("".join(rows_as_text(table, "json"))) == [
        {"n": 1, "n_2": 2, "n_1": 3, "n_3": 4, "t": "x\ny"}
    ]
    assert list(csv.reader("".join(rows_as_text(table, "csv")).splitlines())) == [
        ["n", "n_2", "n_1", "n_3", "t"],
        ["1", "2", "3", "4", r"x\ny"],
    ]
    assert "".join(rows_as_text(table, "table")).splitlines()[1].split()[:4] == list("1234")


def test_rows_in_blocks_are_laid_out_as_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": [1, 2, 3, 4, 5], "b": ["x", None, "wide text", "漢字", "y"]})
    whole = {form: "".join(rows_as_text(table, form)) for form in ("table", "csv", "json")}
    monkeypatch.setattr("ddltrace.analyzer.query.rows_as_text._BLOCK_ROWS", 2)
    assert {form: "".join(rows_as_text(table, form)) for form in whole} == whole
    assert json.loads(whole["json"]) == table.to_pylist()
    assert whole["json"] == json.dumps(table.to_pylist(), indent=1) + "\n"
    assert "".join(rows_as_text(table.slice(0, 0), "json")) == "[]\n"


@pytest.mark.parametrize(
    "sql",
    ["SELECT count(*) FROM range(1000000000) a, range(1000000) b", "FROM range(100000000000)"],
)
def test_a_statement_is_stopped_at_its_timeout(sql: str) -> None:
    with pytest.raises(UsageError, match=r"ran for 0\.05 s and was stopped.*--timeout"):
        run_query(made_trace(), sql, QueryLimits(timeout_s=0.05))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a.range + b.range AS n FROM range(3000) a, range(3000) b ORDER BY n DESC",
        "FROM range(10000000)",
    ],
)
def test_memory_is_limited(sql: str) -> None:
    with pytest.raises(UsageError, match=r"limit of 0\.02 GB.*--memory-limit"):
        run_query(made_trace(), sql, QueryLimits(memory_bytes=20_000_000))


ENDLESS = [
    "SELECT list_sum(range(900000000))",
    "SELECT md5(repeat('x', 3000000000))",
    "SELECT length(repeat('x', 4000000000))",
    "SELECT list_sort(range(rank, 900000000)) FROM events",
    "SELECT list(a.range) FROM range(100000) a, range(100000) b",
    "SELECT string_agg(repeat('x', 1000), '') FROM range(10000000)",
    "SELECT bit_count(repeat('1', 2000000000)::BIT)",
    "SELECT map_from_entries(list_zip(range(90000000), range(90000000)))",
    "WITH RECURSIVE a AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM a) SELECT max(n) FROM a",
    "SELECT list_reduce(range(30000000), lambda x, y: x + y)",
    "SELECT regexp_replace(repeat('ab', 9000000), '(a|b)*c', '', 'g') FROM range(1000)",
    "SELECT count(*) FROM events a, events b, events c, events d, events e",
]


@pytest.mark.parametrize("sql", sampled(ENDLESS, 5))
def test_no_statement_takes_more_memory_or_time_than_it_may(sql: str) -> None:
    """The process that ran it is measured, whatever DuckDB counts as its memory."""
    program = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run([sys.executable, '-m', 'ddltrace', 'query', *sys.argv[1:]])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.returncode)"
    )
    options = ["--timeout", "2", "--memory-limit", "300MB"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(SAMPLE), sql, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    peak_kb, status = map(int, done.stdout.split())
    assert status == 2
    assert done.stderr.count("\n") == 1
    assert re.search(r"--timeout|--memory-limit", done.stderr)
    # 300 MB, and what Python, Arrow and DuckDB themselves take.
    assert peak_kb < 600_000


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM duckdb_settings()",
        "SELECT current_setting('home_directory'), current_setting('secret_directory'), "
        "current_setting('extension_directory'), current_setting('temp_directory')",
        "FROM duckdb_databases()",
    ],
)
def test_settings_do_not_tell_where_the_users_files_are(sql: str) -> None:
    text = str(run_query(made_trace(), sql).to_pylist())
    for place in (Path.home(), Path.cwd(), sys.prefix, sys.base_prefix, SAMPLE.parent):
        assert str(place) not in text


def test_the_end_of_a_process_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, ending in (("import os; os.abort()", "SIGABRT"), ("exit(3)", "status 3")):
        monkeypatch.setattr("ddltrace.analyzer.query.sql._program", lambda p=program: ["-c", p])
        with pytest.raises(UsageError, match=rf"ended its process \({ending}\): it may need more"):
            run_query(made_trace(), "SELECT 1")


def test_an_error_while_a_table_is_read_is_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> Any:
        raise TraceError("rank 0 is damaged")

    monkeypatch.setattr(Trace, "event_tables", damaged)
    with pytest.raises(TraceError, match="rank 0 is damaged"):
        run_query(made_trace(), "SELECT count(*) FROM events")


def test_a_table_is_read_only_as_far_as_it_is_needed() -> None:
    trace = open_trace(SAMPLE)
    assert run_query(trace, "FROM events LIMIT 1").num_rows == 1
    twice = "SELECT count(*) AS n FROM events a JOIN events b USING (rank, start_ns, kind, name)"
    assert run_query(trace, twice)["n"][0].as_py() >= run_query(trace, "FROM events").num_rows // 2


def test_csv_has_no_formula() -> None:
    cells = [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2+3",
        "@SUM(1)",
        "\t=1",
        " =1",
        "\uff1d1",
        "-5",
        "+1e-3",
    ]
    rows = " UNION ALL ".join(f"SELECT '{cell.replace(chr(39), chr(39) * 2)}'" for cell in cells)
    table = run_query(made_trace(), f'SELECT t AS "=t", -5 AS n, -1e-9 AS f FROM ({rows}) a(t)')
    head, *lines = csv.reader("".join(rows_as_text(table, "csv")).splitlines())
    assert head == ["'=t", "n", "f"]
    assert [line[1:] for line in lines] == [["-5", "-1e-09"]] * len(cells)
    shown = [line[0] for line in lines]
    assert shown == ["'" + cell.replace("\t", "\\t") for cell in cells[:7]] + cells[7:]


def test_sizes() -> None:
    assert parse_memory_limit("2GB") == 2_000_000_000
    assert parse_memory_limit(" 1.5 gib") == 3 << 29
    for wrong in ("", "2", "GB", "-1GB", "1B", "2 GB; SET x=1", "9" * 99 + "GB"):
        with pytest.raises(UsageError, match="memory limit"):
            parse_memory_limit(wrong)


def test_limits_are_options() -> None:
    run = CliRunner().invoke
    wrong = run(query, [str(SAMPLE), "SELECT 1", "--memory-limit", "much"])
    assert isinstance(wrong.exception, UsageError)
    small = run(query, [str(SAMPLE), "FROM range(10000000)", "--memory-limit", "16MB"])
    assert "--memory-limit" in str(small.exception)
    late = run(query, [str(SAMPLE), "FROM range(100000000000)", "--timeout", "0.05"])
    assert "--timeout" in str(late.exception)
    assert run(query, [str(SAMPLE), "SELECT 1", "--timeout", "0"]).exit_code == 2
    plan = run(query, [str(SAMPLE), "EXPLAIN SELECT 1"])
    assert len(plan.output.splitlines()) > 3
    assert os.linesep in plan.output


def test_show_tables_lists_all_that_can_be_read():
    trace = made_trace()
    names = [row["name"] for row in run_query(trace, "show tables;").to_pylist()]
    assert names == sorted(TABLES)
    assert {"events", "steps", "kernels"} <= set(names)
    assert run_query(trace, f"SELECT count(*) AS n FROM {names[0]}").num_rows == 1
