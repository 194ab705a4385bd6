"""Numbers that pages show more than once, or as parts of a sum."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from ddltrace.analyzer.compare.comparison import compare, render_comparison
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.html_report import render
from ddltrace.analyzer.report.markdown_report import render_markdown
from ddltrace.analyzer.report.text_report import render_report
from ddltrace.dashboard.address import Address
from ddltrace.dashboard.experiments import OpenExperiment
from ddltrace.dashboard.pages.comparison_page import compare_page
from ddltrace.dashboard.pages.critical_path_page import critical_path_page
from ddltrace.dashboard.pages.experiments_page import experiments_page
from ddltrace.dashboard.pages.overview import overview_page
from ddltrace.dashboard.workspace import Workspace
from ddltrace.experiments.harness.results_file import load
from ddltrace.experiments.harness.results_table import render as render_results

SAMPLES = sorted((Path(__file__).parents[3] / "sample_traces").glob("*/run.json"))
MANY = 120
ON_PATH = {
    "transfer of messages": "transfer",
    "unexplained waiting": "wait",
    "the optimizer's update": "update",
    "data loading": "data",
    "device copies": "copy",
    "host code": "host",
}
"""Name in a sentence -> name in a table."""

SHORT = {
    "exposed comm on a rank": "exposed communication on a rank",
    "waiting on a rank": "waiting for others on a rank",
}
UNITS = {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6}


def text_of(component):
    """All text of a page, in reading order."""
    if component is None or isinstance(component, str | int | float):
        return [] if component is None else [str(component)]
    if isinstance(component, list | tuple):
        return [text for item in component for text in text_of(item)]
    return text_of(getattr(component, "children", None))


def tables_of(component):
    """Rows of cells of every table of a page, heads first."""
    if isinstance(component, list | tuple):
        return [found for item in component for found in tables_of(item)]
    if type(component).__name__ == "Table":
        return [[["".join(text_of(cell)) for cell in row.children] for row in part_rows(component)]]
    return tables_of(component.children) if getattr(component, "children", None) else []


def part_rows(table):
    for part in table.children:
        yield from part.children if isinstance(part.children, list) else [part.children]


def microseconds(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def many_layers(_, rows):
    """The forward pass as more layers than a report has parts."""
    for row in [row for row in rows if row["kind"] == "layer"]:
        rows.remove(row)
        width = (row["end_ns"] - row["start_ns"]) // MANY
        for number in range(MANY):
            start = row["start_ns"] + number * width
            changes = {
                "start_ns": start,
                "end_ns": start + width,
                "name": f"{row['name']}.{number}",
            }
            rows.append(row | changes)
    return rows


def test_categories_and_ranks_of_the_critical_path_sum_to_the_step(write_run_of):
    opened = Workspace([open_trace(write_run_of("layers", change=many_layers))]).get(0)
    analysis = opened.analysis
    step = analysis.summary.step_us.mean
    assert sum(part.us for part in analysis.critical_path) < 0.95 * step  # it is cut off
    assert sum(row.us for row in analysis.critical_path_by_rank) == pytest.approx(step)
    (rows,) = [
        rows
        for rows in tables_of(critical_path_page(opened, Address()))
        if rows[0][:2] == ["category", "all ranks"]
    ]
    shown = [[microseconds(cell) for cell in cells[1:]] for cells in rows[1:]]
    assert sum(cells[0] for cells in shown) == pytest.approx(step, rel=0.005)
    for whole, *ranks in shown:
        assert sum(ranks) == pytest.approx(whole, rel=0.005)


def numbers_in_text(text):
    """Labels and values of the sentences and the summaries of a report."""
    text = " ".join(text.split())
    yield from (
        ("step, mean", value) for value in re.findall(r"A step takes (\S+ \S+) \(mean", text)
    )
    for said in re.findall(r"On the critical path: (.*?)[;.] ", text):
        for value, name in re.findall(r"([\d.]+ %) (.*?)(?:, | and |$)", said):
            yield f"{ON_PATH.get(name, name)} on the critical path", value
    for value in re.findall(r"On average, a rank is idle ([\d.]+ %) of a step", text):
        yield "idle on a rank", value
    for value in re.findall(r"a rank spends ([\d.]+ %) of a step waiting for others", text):
        yield "waiting for others on a rank", value
    for step, said in re.findall(r"A rank's step takes (\S+ \S+) \(mean\): (.*?) Each rank", text):
        yield "step on a rank", step
        for part in said.split(", "):
            value, name = re.fullmatch(r"([\d.]+ %) (.*)", part).groups()
            yield f"{name} on a rank", value
    for value in re.findall(r"compute hides ([\d.]+ %)", text):
        yield "overlap ratio", value


def numbers_in_path_table(text):
    table = text[text.index("On the critical path of a step") :].partition("\n\n")[0]
    for name, time, share in re.findall(r"^  (\w+) +([\d.]+ \S+) +([\d.]+ %)  #", table, re.M):
        yield f"{name} on the critical path", share
        yield f"{name} on the critical path, time", time


def numbers_in_html(page):
    yield from re.findall(r'class="name">([^<]+)</div><div class="value">([^<]+)<', page)
    yield from re.findall(r"</span>([^<>]+ on a rank) <b>([^<]+)</b>", page)
    items = re.search(r'<ul class="sentences">(.*?)</ul>', page, re.S).group(1)
    yield from numbers_in_text(re.sub(r"<[^>]+>", " ", items).replace("&#39;", "'"))


def numbers_in_markdown(text):
    tables = re.findall(r"^\| (step, mean.*) \|\n.*\n\| (.*) \|$", text, re.M)
    for heads, cells in tables:
        yield from zip(heads.split(" | "), cells.split(" | "), strict=True)
    yield from numbers_in_text(text)


def numbers_in_overview(page):
    for tile in tiles_of(page):
        name, value = map("".join, map(text_of, tile.children))
        yield name.lower(), value
    yield from numbers_in_text(" ".join(text_of(page)))


def tiles_of(component):
    if isinstance(component, list | tuple):
        return [found for item in component for found in tiles_of(item)]
    if getattr(component, "className", None) == "tile":
        return [component]
    return tiles_of(component.children) if getattr(component, "children", None) else []


@pytest.mark.parametrize("run", SAMPLES, ids=lambda run: run.parent.name)
def test_one_label_has_one_value_wherever_it_is_shown(run):
    opened = Workspace([open_trace(run.parent)]).get(0)
    text = render_report(opened.analysis)
    html_numbers = list(numbers_in_html(render(opened.analyzed, opened.trace)))
    places = {
        "text": [*numbers_in_text(text), *numbers_in_path_table(text)],
        "HTML": html_numbers,
        "Markdown": list(numbers_in_markdown(render_markdown(opened.analysis))),
        "overview": list(numbers_in_overview(overview_page(opened))),
        "critical path": [
            (f"{cells[0]} on the critical path, time", cells[1])
            for rows in tables_of(critical_path_page(opened, Address()))
            if rows[0][:2] == ["category", "all ranks"]
            for cells in rows[1:]
        ],
    }
    values, seen = defaultdict(set), defaultdict(set)
    for place, numbers in places.items():
        for name, value in numbers:
            label = SHORT.get(name, name)
            values[label].add(value)
            seen[label].add(place)
    assert {label: found for label, found in values.items() if len(found) > 1} == {}
    shared = {label for label, where in seen.items() if len(where) > 1}
    assert shared >= {
        "step, mean",
        "step on a rank",
        "overlap ratio",
        "compute on the critical path",
        "compute on the critical path, time",
        "compute on a rank",
        "exposed communication on a rank",
        "waiting for others on a rank",
        "idle on a rank",
    }
    # What is said to sum does.
    of_html = dict(html_numbers)
    step = microseconds(of_html["step, mean"])
    table = dict(numbers_in_path_table(text))
    times = [microseconds(value) for label, value in table.items() if label.endswith("time")]
    shares = [float(value[:-2]) for label, value in table.items() if not label.endswith("time")]
    assert sum(times) == pytest.approx(step, rel=0.01)
    assert sum(shares) == pytest.approx(100, abs=0.5)
    parts = ("compute", "exposed communication", "copies", "idle")
    on_a_rank = [of_html.get(f"{part} on a rank", "0 %") for part in parts]
    assert sum(float(value[:-2]) for value in on_a_rank) == pytest.approx(100, abs=0.3)


def bars_by(figure, *, upright=False):
    """Place on the axis -> name of a part -> its length, ms."""
    found = defaultdict(dict)
    for bar in figure.data:
        places, lengths = (bar.x, bar.y) if upright else (bar.y, bar.x)
        for place, length in zip(places, lengths, strict=True):
            found[place][bar.name] = float(length)
    return found


@pytest.mark.parametrize("run", SAMPLES, ids=lambda run: run.parent.name)
def test_figures_of_the_report_show_the_numbers_of_its_tables(run):
    analysis = open_trace(run.parent).analyze()
    text = render_report(analysis)
    table = text[text.index("Each rank (totals") :]
    cells = dict(re.findall(r"^  (\d+)  +(\S.*)$", table[: table.index("\n\n")], re.M))
    breakdown = bars_by(figures.rank_breakdown(analysis))
    idle = bars_by(figures.idle_causes(analysis))
    assert set(breakdown) == {f"rank {rank}" for rank in cells}
    for rank, line in cells.items():
        values = re.split(r"  +", line.strip())
        bars = breakdown[f"rank {rank}"]
        overlap = bars.get("compute and communication", 0.0)
        exposed = bars.get("exposed communication", 0.0)
        shown = {
            1: bars.get("compute alone", 0.0) + overlap,
            2: overlap + exposed,
            4: exposed,
            -1: bars.get("idle", 0.0),
        }
        for column, milliseconds in shown.items():
            assert microseconds(values[column]) / 1e3 == pytest.approx(milliseconds, rel=0.006)
        row = next(each for each in analysis.ranks if each.rank == int(rank))
        assert sum(bars.values()) == pytest.approx(row.span_us / 1e3)
        causes = idle[f"rank {rank}"]
        causes.pop("another rank, inside of messages", None)
        assert sum(causes.values()) == pytest.approx(bars.get("idle", 0.0))
    steps = bars_by(figures.step_times(analysis), upright=True)
    walls = [row.wall_us / 1e3 for row in analysis.steps]
    assert [sum(bars.values()) for bars in steps.values()] == pytest.approx(walls)
    steady = [wall for wall, row in zip(walls, analysis.steps, strict=True) if row.steady]
    mean = re.search(r"A step takes (\S+ \S+) \(mean", " ".join(text.split())).group(1)
    assert microseconds(mean) / 1e3 == pytest.approx(sum(steady) / len(steady), rel=0.006)
    for bar in figures.critical_parts(analysis).data:
        for length, share in zip(bar.x, bar.text, strict=True):
            mean_ms = sum(steady) / len(steady)
            assert float(share[:-2]) == pytest.approx(100 * length / mean_ms, abs=0.06)


def test_the_comparison_page_shows_the_numbers_of_the_command(write_run_of):
    traces = [open_trace(write_run_of(name)) for name in ("first", "second")]
    workspace = Workspace(traces)
    pair = [workspace.get(number) for number in range(2)]
    text = render_comparison(compare([pair[0].analysis], [pair[1].analysis]))
    page = compare_page(workspace, Address())
    shown = {
        cells[0].lower(): cells[1:3]
        for rows in tables_of(page)
        if rows[0][1:3] == ["A", "B"]
        for cells in rows[1:]
    }
    names = {
        "step": "step, mean",
        "overlap_ratio": "overlap ratio",
        "compute_share": "compute on a rank",
        "exposed_comm_share": "exposed communication on a rank",
        "idle_share": "idle on a rank",
    }
    for name, label in names.items():
        said = re.search(rf"^  {name} +([\d.]+ \S+) +([\d.]+ \S+)", text, re.M)
        assert said is not None, name
        assert list(said.groups()) == shown[label], name


EXPERIMENT_COLUMNS = (
    *("step", "low", "high", "change", "plain", "tuned"),
    *("overlap", "exposed", "payload", "wire", "codec", "memory", "loss", "accuracy", "to loss"),
)
"""Columns of both tables of the results behind the strategy."""


def numbers_of_results(text):
    """Strategy -> column -> text, from both tables of the command."""
    found = defaultdict(list)
    for table in text.split("\n\n"):
        if not re.search(r"^strategy ", table, re.M):
            continue
        for line in table[table.index("\nstrategy ") + 1 :].splitlines()[1:]:
            name, *_ = line.split("  ")
            rest = line[len(name) :].replace(" %", "%").replace(" ~", "").replace(",", "")
            rest = re.sub(r"(\S+%) \[[^]]*\]", r"\1", rest)
            found[name] += re.sub(r"[\[\]]", " ", rest).split()
    return {
        name: dict(zip(EXPERIMENT_COLUMNS, cells, strict=True)) for name, cells in found.items()
    }


def test_the_experiments_page_shows_the_numbers_of_the_command():
    directory = SAMPLES[0].parents[1] / "experiment-400mbit"
    workspace = Workspace([], [OpenExperiment(0, "experiment", directory)])
    results = load(directory)
    page = experiments_page(workspace, Address())
    (rows,) = [rows for rows in tables_of(page) if rows[0][0] == "strategy"]
    on_page = {cells[0]: dict(zip(rows[0], cells, strict=True)) for cells in rows[1:]}
    in_text = numbers_of_results(render_results(results))
    assert list(on_page) == list(in_text)
    assert len(in_text) == len(results.rows)
    for name, cells in on_page.items():
        said = in_text[name]
        step, low, high = re.fullmatch(r"(\S+ \S+) \[(\S+), (\S+ \S+)\]", cells["step"]).groups()
        low = f"{low} {high.split()[1]}"
        times = {"step": step, "low": low, "high": high, "exposed": cells["exposed"]}
        for column, shown in times.items():
            assert microseconds(shown) / 1e3 == pytest.approx(float(said[column]), rel=0.006)
        change = cells["vs baseline"].split()[0].replace(",", "")
        if change.endswith("%"):  # the page writes 100 % and more in whole percents
            digits = 0.05 if "." in change else 0.5
            assert float(change[:-1]) == pytest.approx(float(said["change"][:-1]), abs=digits)
        else:
            assert change == said["change"] == "baseline"
        assert cells["vs plain"].removesuffix(" ~") == said["plain"]
        assert cells["vs tuned"].removesuffix(" ~") == said["tuned"]
        for column in ("overlap", "accuracy"):
            assert cells[column].replace(" ", "") == said[column]
        assert cells["loss"] == said["loss"]
    assert results.headline() in " ".join(text_of(page))
