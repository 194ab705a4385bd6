"""Pages as Dash components: they are made, and what they say is right."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.utils import PlotlyJSONEncoder

from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.analyzer.live.live_state import Alert, LiveRow, LiveState
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report import figures, palette
from ddltrace.analyzer.report.html_report import render as render_html
from ddltrace.analyzer.report.palette import ROLES, SURFACES
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.analyzer.trace import step_selection
from ddltrace.dashboard import charts, theme
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.pages import comparison_page, live_page, overview, tensors_page
from ddltrace.dashboard.pages.comparison_matrix import differences_card
from ddltrace.dashboard.rank_breakdowns import PARTS, Breakdown
from ddltrace.dashboard.theme import dress, style_sheet
from ddltrace.dashboard.workspace import Workspace, once
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RunInfo

ASSETS = Path(palette.__file__).parent / "assets"
ROWS = (LiveRow(0), LiveRow(1))
DEAD = Alert("dead", (1,), "Rank 1 has died.")
STYLE = Path(theme.__file__).parent / "assets" / "style.css"


def as_json(component):
    return json.dumps(component, cls=PlotlyJSONEncoder)


def pair(first, second, **values):
    """The address of a comparison."""
    return Address({"a": str(first), "b": str(second)} | values)


def test_overview_names_no_saving_that_is_not_known(trace_path):
    opened = Workspace([open_trace(trace_path)]).get(0)
    finding = replace(opened.analysis.findings[0], kind="processors", saves_us=0.0, share=0.0)
    analyzed = replace(opened.analyzed, analysis=replace(opened.analysis, findings=(finding,)))
    vars(opened)["analyzed"] = analyzed
    page = as_json(overview.overview_page(opened))
    assert "processors: " in page
    assert "up to" not in page


def test_overview_leads_with_the_sentences(opened):
    from ddltrace.analyzer.report.sentences import sentences

    page = as_json(overview.overview_page(opened))
    for sentence in sentences(opened.analysis):
        assert json.dumps(sentence)[1:-1] in page


@pytest.mark.parametrize(
    ("hosts", "says"), [(3, "n0, n1, n2 ·"), (4, "n0, n1, n2 · 1 more host ·"), (9, "6 more hosts")]
)
def test_overview_drops_no_host_in_silence(trace_path, hosts, says):
    opened = Workspace([open_trace(trace_path)]).get(0)
    names = tuple(f"n{number}" for number in range(hosts))
    facts = replace(opened.analysis.trace, hosts=names)
    analyzed = replace(opened.analyzed, analysis=replace(opened.analysis, trace=facts))
    vars(opened)["analyzed"] = analyzed
    page = overview.overview_page(opened)
    assert says in page.children[0].children[0].children


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_is_coloured_by_role_and_posts_nothing(opened, theme):
    made = {name: opened.figure(name, make) for name, make in overview.FIGURES.items()}
    assert made["steps"] is not None
    assert made["breakdown"] is not None
    for figure in filter(None, made.values()):
        assert all(trace.meta and trace.meta["role"] for trace in figure.data)
        dressed = dress(figure, theme)
        assert dressed["layout"]["font"]["color"] == SURFACES[theme]["ink"]
        assert figure.layout.font.color is None  # the cached one keeps no theme
    page = as_json(overview.overview_page(opened))
    assert page.count('"showSendToCloud": false') == page.count('"type": "Graph"') > 0


def test_exposed_communication_has_one_colour(opened):
    made = [opened.figure(name, overview.FIGURES[name]) for name in ("overlap", "breakdown")]
    made.append(figures.rank_breakdown(opened.analysis))
    roles = {
        trace.meta["role"] for figure in made for trace in figure.data if "exposed" in trace.name
    }
    assert roles == {"exposed"}


@pytest.mark.parametrize("theme", sorted(ROLES))
def test_traces_with_similar_titles_stay_apart_however_many_they_are(theme):
    titles = [f"{'a' * 30}{number}{'b' * 30}" for number in range(8)]
    dressed = dress(charts.step_distributions([(title, [1.0]) for title in titles]), theme)
    assert len({box["name"] for box in dressed["data"]}) == len(titles)
    parts = [Breakdown(0, 1, dict.fromkeys(PARTS, 1.0), 1, 1)]
    figure = charts.breakdown_of_runs([(title, parts) for title in titles])
    assert len(set(figure.data[0].y)) == len(titles)


def test_tooltips_name_steps_groups_and_numbers(opened):
    steps = opened.figure("steps", overview.FIGURES["steps"])
    assert steps.layout.xaxis.tickprefix == "step "
    assert list(steps.data[0].customdata) == pytest.approx([100] * 4)
    waits = opened.figure("waits", overview.FIGURES["waits"])
    assert "all_reduce 4.00 kB, group 0, 4 times" in list(waits.data[0].y)
    sizes = opened.figure("bandwidth", overview.FIGURES["bandwidth"])
    assert {text[1] for trace in sizes.data for text in trace.customdata} == {"4 times"}


def test_breakdown_bars_sum_to_the_mean_step(opened):
    figure = opened.figure("breakdown", overview.FIGURES["breakdown"])
    totals = [sum(bar.x[rank] for bar in figure.data) for rank in range(2)]
    assert totals == pytest.approx([100, 100])


def test_both_themes_define_the_same_names():
    assert ROLES["light"].keys() == ROLES["dark"].keys()
    assert SURFACES["light"].keys() == SURFACES["dark"].keys()
    assert not ROLES["light"].keys() & SURFACES["light"].keys()
    assert "--compute:" in style_sheet()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_read_on_what_it_stands_on(theme, opened):
    surfaces, roles = SURFACES[theme], ROLES[theme]
    for text in ("ink", "soft", "gain", "alarm"):
        for ground in ("page", "surface", "card", "canvas", "stripe"):
            assert palette.contrast(surfaces[text], surfaces[ground]) >= 4.5, (text, ground)
    assert all(palette.contrast(palette.ink_on(role), role) >= 4.5 for role in roles.values())
    figure = dress(opened.figure("critical", overview.FIGURES["critical"]), theme)
    for trace in figure["data"]:
        assert trace["insidetextfont"]["color"] == palette.ink_on(roles[trace["meta"]["role"]])
        assert trace["outsidetextfont"]["color"] == surfaces["ink"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dressed_figures_are_valid_and_leave_their_originals_alone(theme, opened):
    for name, make in overview.FIGURES.items():
        if (figure := opened.figure(name, make)) is None:
            continue
        before = figure.to_dict()
        dressed = go.Figure(dress(figure, theme))  # checks each property
        assert figure.to_dict() == before
        assert dressed.layout.xaxis.gridcolor == SURFACES[theme]["line"]
        assert dressed.layout.xaxis.title.text == figure.layout.xaxis.title.text


@pytest.mark.parametrize("asset", [STYLE, ASSETS / "report.css", ASSETS / "report.html.jinja"])
def test_every_colour_of_a_style_sheet_is_in_the_palette(asset):
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", asset.read_text()))
    assert used - {"font", "swatch", "top"} <= SURFACES["light"].keys() | ROLES["light"].keys()


def test_a_trace_without_events_has_a_page(tmp_path):
    (tmp_path / "nothing").mkdir()
    write_run(tmp_path / "nothing", RunInfo(status="complete"))
    workspace = Workspace([open_trace(tmp_path / "nothing")])
    assert "Nothing was measured" in as_json(overview.overview_page(workspace.get(0)))


def test_what_to_know_of_a_partial_trace_is_said_everywhere(write_run_of):
    def lose(rank, rows):
        return [row for row in rows if rank == 0 or row["seq"] != 3]

    path = write_run_of("half", steps=8, change=lose)
    changed = {"status": "partial", "exit_status": 1, "checksum": None}
    run = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(run | changed))
    workspace = Workspace([open_trace(path), open_trace(write_run_of("whole", steps=8))])
    opened = workspace.get(0)
    says = [
        "the trace is partial; the job ended with status 1",
        "1 of 17 collectives lacks the record of some rank",
    ]
    assert opened.notes == says
    client = create_app(workspace).server.test_client()
    assert client.get("/api/0/notes").get_json()["notes"] == opened.notes
    pages = (
        overview.overview_page(opened),
        comparison_page.compare_page(workspace, pair(0, 1)),
        render_report(opened.analysis),
        render_html(opened.analyzed, opened.trace),
    )
    for page in map(as_json, pages):
        assert "lacks the record of some rank" in page
        assert "partial; the job ended with status 1" in page
    assert "things to know of A: half" in as_json(pages[1])
    assert "of B: whole" not in as_json(pages[1])


def test_comparing_takes_two_traces(workspace):
    assert "Comparing takes two traces" in as_json(
        comparison_page.compare_page(workspace, pair(0, 1))
    )


def test_timelines_are_aligned_at_a_step(write_run_of):
    paths = [write_run_of("first", steps=4), write_run_of("second", steps=2, step_ms=120)]
    workspace = Workspace([open_trace(path) for path in paths])

    def shifts(address):
        page = as_json(comparison_page.compare_page(workspace, address))
        return page, [int(shift) for shift in re.findall(r'"shift": (\d+)', page)]

    assert shifts(pair(0, 1))[1] == [0, 0]
    page, found = shifts(pair(0, 1, step="1"))
    assert found == [100 * 1_000_000, 120 * 1_000_000]
    assert "from the start of step 1." in page
    page, found = shifts(pair(0, 1, step="3"))
    assert found == [300 * 1_000_000, 0]
    assert "B has no such step" in page


def test_tensors_are_shown_of_one_step(write_run_of):
    def late(rank, rows):
        """Of step 2 every gradient comes 1 ms later than in the others."""
        return [
            row | {"start_ns": row["start_ns"] + 10**6, "end_ns": row["end_ns"] + 10**6}
            if row["kind"] == "gradient" and row["step"] == 2
            else row
            for row in rows
        ]

    opened = Workspace([open_trace(write_run_of("late", change=late))]).get(0)
    usual = {row.name: row.ready_us for row in opened.tensors_of(1)}
    later = {row.name: row.ready_us for row in opened.tensors_of(2)}
    assert later == {name: ready + 1000 for name, ready in usual.items()}
    page = as_json(tensors_page.tensors_page(opened, Address({"step": "2"})))
    assert "Step 2: medians over ranks" in page
    assert "/tensors?step=1" in page
    missing = as_json(tensors_page.tensors_page(opened, Address({"step": "99"})))
    assert "The trace has no step 99." in missing
    assert "Medians over ranks and steady steps" in missing


def test_a_trace_compared_with_itself_does_not_differ(trace_path):
    workspace = Workspace([open_trace(trace_path), open_trace(trace_path)])
    assert [opened.title for opened in workspace.traces] == ["run (1)", "run (2)"]
    page = as_json(comparison_page.compare_page(workspace, pair(0, 1)))
    assert "same" in page
    assert '"gain"' not in page
    assert '"loss"' not in page
    with pytest.raises(TraceError, match="no trace 5"):
        comparison_page.compare_page(workspace, pair(0, 5))


@pytest.mark.parametrize(
    ("steps", "step_ms", "says"),
    [
        (8, 120, "It is not known whether B's step is shorter or longer than A's."),
        (8, 120, "Trace each job at least three times"),
        (8, 600, "B's mean step is 500 ms (500.0 %) longer."),
        (4, 120, "Too few steady steps to compare step times: each trace needs 5."),
    ],
)
def test_the_headline_says_what_the_comparison_finds(write_run_of, steps, step_ms, says):
    paths = [write_run_of("first", steps=steps), write_run_of("second", steps=8, step_ms=step_ms)]
    workspace = Workspace([open_trace(path) for path in paths])
    assert says in as_json(comparison_page.compare_page(workspace, pair(0, 1)))


@pytest.mark.parametrize(
    ("value", "says"),
    [(12345, "12,345"), (20.6789, "20.68"), (123456.7, "123,457"), (None, NOT_KNOWN)],
)
def test_counts_are_written_in_full(value, says):
    assert comparison_page._number_text(value) == says


def test_what_only_one_of_two_traces_has_differs(write_run_of):
    """The second run gathers instead of reducing."""
    gathered = write_run_of(
        "gathered",
        change=lambda _, rows: [
            row | {"op": "all_gather"} if row["op"] == "all_reduce" else row for row in rows
        ],
    )
    workspace = Workspace([open_trace(write_run_of("reduced")), open_trace(gathered)])
    page = as_json(differences_card(workspace.get(0), workspace.get(1)))
    assert "all_reduce of group 0, 4.00 kB: wait" in page
    assert "all_gather of group 0, 4.00 kB: wait" in page
    assert page.count("only in A") == page.count("only in B") > 0


def test_what_may_be_noise_is_neither_gain_nor_loss(write_run_of):
    def wobble(rank, rows):
        """Every other step's optimizer runs on for 8 ms, so that the next step begins later."""
        return [late(row) for row in rows]

    def late(row):
        step = row["step"] or 0
        by = (step // 2 + step % 2) * 8_000_000
        times = {key: row[key] + by for key in ("start_ns", "end_ns") if row[key] is not None}
        if row["kind"] == "step" and not step % 2:
            times["end_ns"] += 8_000_000
        return row | times

    paths = [
        write_run_of("first", steps=9, change=wobble),
        write_run_of("second", steps=9, step_ms=101, change=wobble),
        write_run_of("third", steps=9, step_ms=600, change=wobble),
    ]
    workspace = Workspace([open_trace(path) for path in paths])
    rows = [
        {row.children[0].children: row for row in page_rows(workspace, 0, other)}
        for other in (1, 2)
    ]
    near, far = (side["Step, mean"].children for side in rows)
    assert near[-1].children == "not decided"
    assert near[3].children.className == ""
    assert near[3].children.children.startswith("+")
    assert far[-1].children == ""
    assert far[3].children.className == "loss"
    assert rows[1]["Step, median"].children[3].children.className == ""  # nothing judges it


def page_rows(workspace, first, second):
    """The rows of a comparison's table of numbers."""
    numbers = comparison_page.compare_page(workspace, pair(first, second)).children[2]
    return numbers.children[1].children[0].children.children[1].children


def test_of_a_trace_too_long_the_last_steps_are_analyzed_and_all_are_shown(
    write_run_of, monkeypatch
):
    path = write_run_of("run", steps=8)
    monkeypatch.setattr(step_selection, "MOST_BYTES", 20_000)
    opened = Workspace([open_trace(path)]).get(0)
    shown = [row.step for row in opened.analysis.steps]
    assert 0 < len(shown) < 8
    assert shown[-1] == 7
    # The timeline needs little memory per event, so it shows every step.
    first = next(track.first_row for track in opened.timeline.tracks if track.kind == "steps")
    assert opened.timeline.rows[first].name.tolist() == list(range(8))
    page = as_json(overview.overview_page(opened))
    assert page.count("are too many to analyze at once: of steps 0 to 7") == 1


def test_what_is_dear_is_made_once_for_everybody():
    made, go = [], threading.Event()

    class Owner:
        @once
        def value(self):
            go.wait(10)
            made.append(len(made))
            return made[-1]

    owner = Owner()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(getattr, owner, "value") for _ in range(4)]
        go.set()
    assert {answer.result() for answer in answers} == {0}


def test_what_cannot_be_made_is_tried_again():
    attempts = iter([TraceError("not yet"), None])

    class Owner:
        @once
        def value(self):
            if (error := next(attempts)) is not None:
                raise error

    owner = Owner()
    with pytest.raises(TraceError, match="not yet"):
        owner.value  # noqa: B018 (it is computed)
    assert owner.value is None


def test_other_work_is_said_before_times_are_compared(tmp_path):
    """Kernels, operators and their counts are the same; the batch is not."""
    traces = []
    for batch in (64, 32):
        events = [
            {"ph": "X", "name": name, "cat": category, "ts": 1000 * step, "dur": length}
            | {"pid": 1, "tid": 1, "args": args}
            for step in range(3)
            for name, category, length, args in (
                (f"ProfilerStep#{step}", "user_annotation", 1000, {}),
                ("aten::mm", "cpu_op", 100, {"Input Dims": [[batch, 3], [3, 4]]}),
            )
        ]
        path = tmp_path / f"{batch}.json"
        head = {"schemaVersion": 1, "deviceProperties": []}
        path.write_text(json.dumps(head | {"traceEvents": events}))
        traces.append(open_trace(path))
    workspace = Workspace(traces)
    said = "first dimension is 0.50 times as large, as with another batch size"
    assert said in as_json(comparison_page.compare_page(workspace, pair(0, 1)))
    assert "another batch size" not in as_json(comparison_page.compare_page(workspace, pair(0, 0)))


@pytest.mark.parametrize(
    ("state", "headline", "ranks"),
    [
        (LiveState(rows=ROWS), "The job is running: 7 steps so far on 2 ranks", "2 of 2"),
        (
            LiveState(rows=ROWS, alerts=(DEAD,)),
            "The job is running: 7 steps so far on 1 of 2 ranks",
            "1 of 2",
        ),
        (
            LiveState(status="complete", exit_status=0, rows=ROWS),
            "The job has ended: exit status 0, after 7 steps",
            "2 of 2",
        ),
        (
            LiveState(status="partial", exit_status=1, rows=ROWS, alerts=(DEAD,)),
            "The job has failed: exit status 1, after 7 steps",
            "1 of 2",
        ),
        (
            LiveState(status="partial", rows=ROWS, alerts=(DEAD,)),
            "The job has failed, after 7 steps",
            "1 of 2",
        ),
        (LiveState(status="partial", exit_status=2), "The job has failed: exit status 2", "0 of 2"),
    ],
)
def test_the_live_page_says_how_the_job_ended(tmp_path, state, headline, ranks):
    state = replace(state, num_steps=7, world_size=2)
    (tmp_path / "a trace").mkdir()
    write_run(tmp_path / "a trace", RunInfo(status="complete"))
    workspace = Workspace([open_trace(tmp_path / "a trace")])
    shown = as_json(live_page.headline(workspace, state, Address()))
    assert f'"{headline}"' in shown
    command = f"ddltrace dashboard '{tmp_path}/a trace'"
    assert (command in shown) == (state.status != "running")
    assert f'"{ranks}"' in as_json(live_page.summary(state))
