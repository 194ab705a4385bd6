"""The pages of tensors, communication, the critical path, SQL, experiments and traces."""

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from plotly.utils import PlotlyJSONEncoder

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.query.result_tables import OF_ANALYSIS
from ddltrace.dashboard import charts
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.app import create_app, page_content
from ddltrace.dashboard.discovery import discover
from ddltrace.dashboard.experiments import OpenExperiment
from ddltrace.dashboard.pages import communication_page, sql_page, tensors_page
from ddltrace.dashboard.pages.collective_events import Filter, select
from ddltrace.dashboard.pages.experiments_page import experiments_page
from ddltrace.dashboard.pages.page_list import PAGES, make_figure, page_at
from ddltrace.dashboard.pages.sorted_table import Column, sort_rows
from ddltrace.dashboard.pages.tensor_messages import messages_of
from ddltrace.dashboard.workspace import Workspace
from ddltrace.experiments.harness.results import Results, Run, summarize
from ddltrace.experiments.harness.results_file import write
from ddltrace.tracer.errors import TraceError, UsageError


def as_json(component):
    return json.dumps(component, cls=PlotlyJSONEncoder)


def chosen(opened, address, **options):
    """The collectives that an address admits."""
    wanted = Filter.of(Address.parse(address))
    return select(opened.analyzed, opened.trace.origin_ns, wanted, **{"limit": 1000} | options)


def finished(strategy, step_us, round_number):
    return Run(
        strategy=strategy,
        round=round_number,
        seed=round_number,
        status="complete",
        trace=None,
        step_us=[step_us + number for number in range(20)],
        first_step=2,
        losses=[2.0 - 0.01 * number for number in range(22)],
        elapsed_us=[1e4 * number for number in range(22)],
        payload_bytes=4e6,
        wire_bytes=3e6,
    )


@pytest.fixture
def experiment(tmp_path):
    directory = tmp_path / "experiment"
    directory.mkdir()
    rows = [
        summarize(name, [finished(name, us, number) for number in (1, 2, 3)])
        for name, us in (("ddp", 9000.0), ("topk:density=0.01", 5000.0))
    ]
    settings = {"workload": "digits", "width": 8, "ranks": 2, "steps": 22, "warmup": 2}
    results = Results(settings=settings, rows=rows, baseline="ddp", status="complete")
    write(results, directory)
    return directory


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_made_of_a_trace_and_without_one(page, workspace):
    assert page.make(workspace, Address()) is not None
    empty = Workspace([])
    if page.name in ("compare", "experiments", "traces"):
        assert page.make(empty, Address()) is not None
    else:
        with pytest.raises(TraceError, match="shows no trace"):
            page.make(empty, Address())


def test_a_page_that_fails_says_why(workspace, capsys):
    def broken(*_):
        raise ZeroDivisionError("<b>by zero")

    shown = as_json(page_content(workspace, replace(PAGES[0], make=broken), Address()))
    assert "ZeroDivisionError: <b>by zero" in shown
    assert "Traceback" in capsys.readouterr().err
    missing = as_json(page_content(workspace, PAGES[0], Address.parse("trace=9")))
    assert "this dashboard has no trace 9" in missing


def test_pages_are_found_by_their_address():
    assert [page.name for page in PAGES if page_at(page.path + "/") is not page] == []
    assert page_at("/no-such-page") is None


def test_tensors_stand_in_the_order_of_backward_or_of_a_column(opened):
    rows = opened.analysis.tensors
    ready = [row.ready_us for row in tensors_page.backward_order(rows)]
    assert ready == sorted(ready)
    assert ready[0] < ready[-1]
    page = as_json(tensors_page.tensors_page(opened, Address.parse("?sort=size")))
    largest, smallest = (f(rows, key=lambda row: row.bytes).name for f in (max, min))
    table = page[page.index("All tensors") :]
    assert table.index(largest) < table.index(smallest)


def test_a_tensor_has_its_message_on_every_rank(opened):
    name = opened.analysis.tensors[0].name
    found = messages_of(opened, name, 1)
    assert [message.rank for message in found] == list(opened.trace.ranks)
    assert {message.title.split(" ")[0] for message in found} == {"all_reduce"}
    assert all(message.length_us > 0 and message.enqueue_us < message.start_us for message in found)


def test_sorting_puts_unknown_values_last():
    column = Column("n", "n", str, lambda value: value)
    assert sort_rows([2, None, 5, 3], column) == [5, 3, 2, None]
    names = Column("n", "n", str, lambda value: value)
    assert sort_rows(["b", None, "a"], names) == ["a", "b", None]


def test_collectives_are_filtered_by_the_rank_that_came_last(opened):
    everything = chosen(opened, "")
    assert len(everything.rows) == everything.total == opened.analysis.joining.collectives
    late = chosen(opened, "rank=1")
    assert late.rows == [row for row in everything.rows if row.last_rank == 1] != []
    assert chosen(opened, "op=broadcast").admitted == 0
    assert chosen(opened, "rank=x").admitted == chosen(opened, f"rank={'9' * 5000}").admitted == 0


def test_collectives_are_sorted_as_the_table_says(opened):
    for sort in ("step", "size", "skew", "late", "wait", "transfer", "last"):
        value = {"size": "bytes", "step": "step", "last": "last_rank", "late": "lateness_us"}
        name = value.get(sort, f"{sort}_us")
        values = [getattr(row, name) for row in chosen(opened, "", sort=sort).rows]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=True)
        assert values == known + [None] * (len(values) - len(known))
    few = chosen(opened, "", sort="op", limit=3)
    assert [row.title for row in few.rows] == [f"all_reduce #{number}" for number in range(3)]
    assert few.admitted == few.total > 3


def test_the_map_of_ranks_and_steps_shows_what_the_analysis_has(opened):
    of = opened.analysis.rank_steps
    shape = (len(set(of["rank"])), len(set(of["step"])))
    for shown, (column, _) in charts.HEAT.items():
        found = charts.ranks_by_step(opened.analyzed, shown).data[0]
        assert np.shape(found.z) == shape
        if column is not None:
            assert np.ravel(found.z) == pytest.approx(of[column] / 1e6)
    late = np.sum(charts.ranks_by_step(opened.analyzed, "late").data[0].z)
    rows = [row for row in chosen(opened, "").rows if row.step is not None]
    assert late == pytest.approx(sum(row.lateness_us or 0 for row in rows) / 1e3)
    assert late > 0


def test_many_steps_are_grouped_in_the_map(opened):
    analysis = opened.analysis
    steps, ranks = 1001, 2
    of = {name: np.zeros(steps * ranks) for name in analysis.rank_steps}
    of["rank"] = np.repeat(np.arange(ranks), steps)
    of["step"] = np.tile(np.arange(steps), ranks)
    of["wall_ns"] = of["step"] * 1e6 + of["rank"]
    analyzed = replace(opened.analyzed, analysis=replace(analysis, rank_steps=of))
    found = charts.ranks_by_step(analyzed, "time").data[0]
    assert list(found.x[:3]) == [0, 3, 6]
    assert found.z[0][:2] == pytest.approx([1, 4])  # means of three steps
    assert found.z[0][-1] == pytest.approx(999.5)
    assert np.shape(found.z) == (2, 334)


def test_who_came_last_to_a_collective_is_not_known_while_a_member_is_missing(write_run_of):
    """Rank 1 was killed before it came to the last all_reduce."""
    path = write_run_of(
        "killed",
        change=lambda rank, rows: [row for row in rows if rank == 0 or row["seq"] != 6],
    )
    trace = Workspace([open_trace(path)]).get(0)
    (partial,) = chosen(trace, "state=partial").rows
    assert partial.title == "all_reduce #6"
    assert partial.ranks == 1
    assert partial.last_rank is partial.lateness_us is partial.skew_us is partial.wait_us is None
    page = as_json(communication_page.communication_page(trace, Address.parse("state=partial")))
    assert "1, partial" in page


def test_columns_of_tables_are_known_without_their_rows(opened):
    for name, make in OF_ANALYSIS.items():
        assert opened.columns_of(name) == make(opened.analyzed).column_names


def test_a_statement_uses_the_analysis_at_hand(opened, monkeypatch):
    assert opened.analyzed
    monkeypatch.delattr("ddltrace.analyzer.query.sql.analyze_in_full")
    assert opened.query("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 4}]


def test_sql_runs_what_was_asked_for_and_no_other_statement_of_an_address(opened, monkeypatch):
    statement = "SELECT step, wall_us FROM steps ORDER BY step"
    asked = Address().link("", q=statement)
    workspace = Workspace([opened.trace])
    with monkeypatch.context() as patched:
        patched.delattr("ddltrace.dashboard.workspace.run_query")
        page = as_json(sql_page.sql_page(opened, Address.parse(asked)))
        assert statement in page
        assert "rows" not in page
        assert make_figure(workspace, "sql-plot", Address.parse(asked)) is None
    for one in (opened, workspace.get(0)):
        one.ask(statement)
    assert "4 rows" in as_json(sql_page.sql_page(opened, Address.parse(asked)))
    assert make_figure(workspace, "sql-plot", Address.parse(asked)) is not None
    refused = Address().link("", q="COPY steps TO 'out.csv'")
    opened.ask("COPY steps TO 'out.csv'")
    assert "warning" in as_json(sql_page.sql_page(opened, Address.parse(refused)))
    with pytest.raises(UsageError):
        opened.query("ATTACH 'other.db'")


def test_examples_of_sql_are_valid(opened):
    for title, statement in sql_page.EXAMPLES:
        assert opened.query(statement).num_columns >= 2, title


def test_csv_has_every_type_and_no_formula(opened):
    result = opened.query(
        "SELECT INTERVAL 2 DAY AS \"=span\", 'x'::BLOB AS b, '=1+1' AS name, '-5' AS n, -5 AS m"
    )
    heads, cells = csv.reader(sql_page.as_csv(result).splitlines())
    assert heads == ["'=span", "b", "name", "n", "m"]
    assert "days=2" in cells[0]
    assert cells[1:] == ["b'x'", "'=1+1", "-5", "-5"]


def test_csv_writes_lists_as_text():
    result = pa.table({"name": pa.array(["a", "b"]).dictionary_encode(), "ids": [[1, 2], None]})
    assert sql_page.as_csv(result) == '"name","ids"\n"a","[1, 2]"\n"b",\n'


def test_an_experiment_is_found_shown_and_read_again(experiment, trace_path):
    found = discover([str(experiment.parent), str(trace_path)])
    assert found.experiments == [experiment]
    assert trace_path in found.traces
    workspace = Workspace([], [OpenExperiment(0, "experiment", experiment)])
    page = as_json(experiments_page(workspace, Address()))
    assert "topk:density=0.01 is 1.80 times as fast as ddp" in page
    assert make_figure(workspace, "exp-steps", Address()) is not None
    grown = workspace.experiments[0].results
    grown.rows[1].runs.clear()
    write(Results(settings=grown.settings, rows=grown.rows[:1], status="running"), experiment)
    running = as_json(experiments_page(workspace, Address()))
    assert "topk" not in running
    assert "refresh" in running
    assert "refresh" not in page


def test_what_failed_or_diverged_is_neither_hidden_nor_called_the_fastest(experiment):
    """One run of the fastest strategy diverged; another strategy failed."""
    runs = [finished("wrong", 1000.0, number) for number in (1, 2)]
    reason = "the loss is not finite " + "x" * 200
    rows = OpenExperiment(0, "experiment", experiment).results.rows
    rows += [
        summarize("wrong", [*runs, replace(runs[0], round=3, status="diverged", reason=reason)]),
        summarize("broken", [replace(runs[0], status="failed", reason=reason)]),
    ]
    write(Results(settings={}, rows=rows, baseline="ddp", status="failed"), experiment)
    workspace = Workspace([], [OpenExperiment(0, "experiment", experiment)])
    page = as_json(experiments_page(workspace, Address()))
    assert "topk:density=0.01 is 1.80 times as fast as ddp" in page
    table = page[page.index("Strategies") :]
    assert '"children": "diverged", "className": "loss"' in table
    assert f"failed: {reason}" in table


def test_columns_that_do_not_fit_are_hidden_but_saved(experiment):
    workspace = Workspace([], [OpenExperiment(0, "experiment", experiment)])
    few = as_json(experiments_page(workspace, Address()))
    full = as_json(experiments_page(workspace, Address.parse("columns=all")))
    assert few.count('"hidden": true') == 4 * 3  # of the head and two rows
    assert few.count("4.00 MB") == full.count("4.00 MB") == 2  # the payload
    assert "columns=all" in few
    assert '"hidden": true' not in full


def test_damaged_results_are_one_line(experiment):
    (experiment / "results.json").write_text("{")
    workspace = Workspace([], [OpenExperiment(0, "experiment", experiment)])
    with pytest.raises(TraceError, match="damaged"):
        experiments_page(workspace, Address())


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(TraceError, match="does not exist"):
        discover([str(tmp_path / "none")])


def test_links_do_not_leave_the_folder(tmp_path, trace_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(trace_path)
    assert discover([str(folder)]).traces == [folder]


def test_traces_of_an_experiment_that_grows_are_opened(experiment, trace_path, tmp_path):
    workspace = Workspace([], [OpenExperiment(0, "experiment", experiment)])
    shown = workspace.experiments[0]
    assert workspace.show_trace(experiment / "ddp", shown) is None
    shutil.copytree(trace_path, experiment / "ddp")
    shutil.copytree(trace_path, tmp_path / "elsewhere")
    assert workspace.show_trace(experiment / "ddp", shown) == 0
    assert workspace.show_trace(experiment / "ddp", shown) == 0
    # A damaged file of results could name a trace elsewhere.
    assert workspace.show_trace(experiment / ".." / "elsewhere", shown) is None
    client = create_app(workspace).server.test_client()
    assert client.get("/api/0/layout").get_json()["ranks"] == [0, 1]
    # The choice of traces offers it, also in pages that are open already.
    layout = json.dumps(client.get("/_dash-layout").get_json())
    assert '"label": "ddp", "value": 0' in layout
