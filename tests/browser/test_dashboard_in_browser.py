"""The dashboard in a real Chromium: every page, keys and mouse, links, evil names."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import pyarrow as pa
import pytest
from axe_playwright_python.sync_playwright import Axe
from support.jobs import free_port
from support.pages import PATIENCE_MS, new_page
from support.sampling import sampled

import ddltrace
from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.formatting.units import change_text, time_text
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.experiments import OpenExperiment
from ddltrace.dashboard.pages.sql_page import EXAMPLES
from ddltrace.dashboard.runs.allowed_runs import AllowedRuns
from ddltrace.dashboard.server import _leading_to, bind, running
from ddltrace.dashboard.stored import stored_trace
from ddltrace.dashboard.stored.marks import FILE
from ddltrace.dashboard.widgets import LONGEST_TABLE
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.trace.event_file import write_events
from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RunInfo
from ddltrace.tracer.trace.schema import EVENTS

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1280, 1920)
GRID_SECONDS = 15
"""Until the rows of a statement are drawn; a page of 100 rows of components took 17."""

SAMPLES = sorted(path.parent for path in (ROOT / "sample_traces").glob("*/run.json"))
HOSTILE = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>\x1b[31m"
ATTRIBUTES = "view, scene, source, selected, hits, query, props, marks"
TIMELINE = "document.getElementById('timeline').timeline"


class Grid:
    """The rows of a grid, also those that are not drawn."""

    def __init__(self, visit: Visit, name: str) -> None:
        self._page = visit.page
        self._api = f"window.dash_ag_grid.getApi('grid-{name}')"

    def count(self) -> int:
        """How many rows its filters admit."""
        return int(self._page.evaluate(f"{self._api}.getDisplayedRowCount()"))

    def values(self, column: int) -> list[Any]:
        """The values of a column, in the order of the rows."""
        return list(
            self._page.evaluate(
                f"(() => {{ const values = []; {self._api}.forEachNodeAfterFilterAndSort("
                f"({{ data }}) => values.push(data.v{column})); return values; }})()"
            )
        )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trace in which every name is an attack."""
    source, target = SAMPLES[0], tmp_path_factory.mktemp("hostile") / HOSTILE.replace("/", "|")
    target.mkdir()
    run = json.loads((source / "run.json").read_text())
    run["command"] = [HOSTILE]
    run["notes"] = [HOSTILE]
    for table in run["tensor_tables"]:
        for tensor in table:
            tensor["name"] = HOSTILE + tensor["name"]
    (target / "run.json").write_text(json.dumps(run | {"checksum": None}))
    for rank in run["ranks"]:
        events, _ = read_events(source, rank["segment"])
        for column in ("name", "lane", "dtype"):
            coded = events[column].combine_chunks()
            names = pa.array([HOSTILE + name for name in coded.dictionary.to_pylist()], pa.string())
            evil = pa.DictionaryArray.from_arrays(coded.indices, names)
            number = EVENTS.get_field_index(column)
            events = events.set_column(number, EVENTS.field(column), evil)
        write_events(target, rank["segment"], iter(events.to_batches()))
    return target


@pytest.fixture(scope="module")
def address(hostile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard of the first sample, the last one, an evil one and an empty one."""
    nothing = tmp_path_factory.mktemp("empty") / "nothing"
    nothing.mkdir()
    write_run(nothing, RunInfo(status="complete"))
    paths = (SAMPLES[0], SAMPLES[-1], hostile, nothing)
    workspace = Workspace([ddltrace.open(path) for path in paths])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        yield url


class Visit:
    """A page of the dashboard, and what went wrong or out while it was there."""

    def __init__(self, browser: Any, address: str, path: str, **options: Any) -> None:
        self.troubles: list[str] = []
        options = {"viewport": {"width": 1280, "height": 800}} | options
        self.page = new_page(browser, **options)
        self.page.on("pageerror", lambda error: self.troubles.append(f"error {error}"))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self._asked(request.url, address))
        self.page.on("response", self._answered)
        self.page.goto(address + path)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"console: {message.text}")

    def _asked(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.troubles.append(f"asked for {url}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.troubles.append(f"{response.status} for {response.url}")

    def timeline(self, selector: str = "#timeline") -> Visit:
        """Waits until the timeline has painted a frame from the server."""
        self.page.wait_for_selector(f"{selector}[data-sharp]")
        return self

    def state(self, expression: str) -> Any:
        """The value of an expression over the attributes of the timeline's engine."""
        return self.page.evaluate(
            f"(() => {{ const {{ {ATTRIBUTES} }} = {TIMELINE}; return {expression}; }})()"
        )

    def until(self, expression: str) -> None:
        """Waits until an expression over the timeline's engine holds."""
        self.until_true(lambda: self.state(expression), expression)

    def until_true(self, holds: Callable[[], Any], what: str) -> None:
        """Waits for something; playwright's own waiting evaluates strings, which the page's
        policy forbids."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not holds():
            assert time.monotonic() < deadline, f"never: {what}"
            self.page.wait_for_timeout(25)

    def figures(self) -> int:
        """Waits until all figures of the page are drawn; returns how many there are."""
        self.page.wait_for_selector(".graph")
        self.until_true(
            lambda: self.page.evaluate(
                "[...document.querySelectorAll('.graph')].every("
                "g => g.querySelector('.js-plotly-plot')?.data?.length > 0)"
            ),
            "all figures are drawn",
        )
        return int(self.page.locator(".graph svg.main-svg .cartesianlayer").count())

    def barriers(self) -> list[tuple[str, list[Any]]]:
        """Serious and critical violations of the accessibility rules of axe-core."""
        # The first rows of a long table stand for all.
        context = {"exclude": [["tbody tr:nth-child(n+5)"], [".grid .ag-row:nth-child(n+5)"]]}
        found = Axe().run(self.page, context=context).response["violations"]
        return [
            (each["id"], [node["target"] for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return bool(
            self.page.evaluate(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
        )


@pytest.mark.parametrize(
    ("width", "theme"), sampled([(w, t) for w in WIDTHS for t in ("light", "dark")], 2)
)
def test_overview(browser: Any, address: str, width: int, theme: str) -> None:
    visit = Visit(
        browser, address, "", viewport={"width": width, "height": 900}, color_scheme=theme
    )
    visit.page.wait_for_selector(".headline h1")
    assert visit.figures() >= 6
    assert visit.page.locator("html").get_attribute("data-theme") == theme
    assert visit.fits()
    assert visit.barriers() == []
    assert visit.troubles == []


@pytest.mark.long
def test_theme_is_kept(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "", color_scheme="light")
    visit.figures()
    bar = visit.page.locator(".graph .bars path").first
    read = "bar => getComputedStyle(bar).fill"
    before = bar.evaluate(read)
    visit.page.click("#switch-theme")
    visit.until_true(lambda: bar.evaluate(read) != before, "figures follow the page")
    visit.page.goto(address + "timeline")
    assert visit.page.locator("html").get_attribute("data-theme") == "dark"
    assert visit.troubles == []


def test_nothing_stands_over_a_legend_and_no_tile_alone(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "", viewport={"width": 1440, "height": 900})
    visit.figures()
    for graph in visit.page.locator(".graph:has(.infolayer > .legend)").all():
        graph.scroll_into_view_if_needed()
        graph.hover()
        parts = (".modebar", ".infolayer > .legend")
        buttons, legend = (graph.locator(part).bounding_box() for part in parts)
        assert buttons["x"] >= legend["x"] + legend["width"]
    for width in (1440, 1000, 700):
        visit.page.set_viewport_size({"width": width, "height": 900})
        tops = [tile.bounding_box()["y"] for tile in visit.page.locator(".tile").all()]
        assert all(tops.count(top) > 1 for top in tops), width
    assert visit.troubles == []


def test_the_timeline_tells_what_the_analysis_finds(browser: Any, tmp_path: Path) -> None:
    run = json.loads((SAMPLES[0] / "run.json").read_text())
    shutil.copytree(SAMPLES[0], tmp_path / "partial")
    (tmp_path / "partial" / "run.json").write_text(
        json.dumps(run | {"exit_status": 3, "checksum": None})
    )
    workspace = Workspace([ddltrace.open(tmp_path / "partial")])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "timeline").timeline()
        note = visit.page.locator(".tl-notes li").filter(has_text="ended with status 3")
        note.wait_for(state="attached")
    assert visit.troubles == []


@pytest.mark.parametrize("width", sampled(WIDTHS, 1))
def test_timeline_zooms_pans_and_fits(browser: Any, address: str, width: int) -> None:
    visit = Visit(browser, address, "timeline", viewport={"width": width, "height": 900}).timeline()
    whole = visit.state("view.width")
    visit.page.locator(".tl-canvas").hover(position={"x": 500, "y": 200})
    visit.page.keyboard.press("w", delay=200)
    visit.until(f"view.width < {whole}")
    zoomed, start = visit.state("view.width"), visit.state("view.t0")
    visit.page.keyboard.press("d", delay=100)
    visit.until(f"view.t0 > {start}")
    assert visit.state("view.width") == pytest.approx(zoomed)
    visit.page.keyboard.down("Control")
    visit.page.mouse.wheel(0, -400)
    visit.page.keyboard.up("Control")
    visit.until(f"view.width < {0.9 * zoomed}")
    start = visit.state("view.t0")
    box = visit.page.locator(".tl-canvas").bounding_box()
    visit.page.mouse.move(box["x"] + 600, box["y"] + 100)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 400, box["y"] + 100, steps=4)
    visit.page.mouse.up()
    visit.until(f"view.t0 > {start}")
    visit.page.keyboard.press("Escape")
    visit.page.keyboard.press("f")
    visit.until(f"view.width === {whole}")
    assert visit.fits()
    assert visit.barriers() == []
    assert visit.troubles == []


def test_pixels_are_painted(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    colours = visit.page.evaluate(
        """() => {
          const canvas = document.querySelector(".tl-canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) {
            seen.add("rgb(" + data[i] + "," + data[i + 1] + "," + data[i + 2] + ")");
          }
          const roles = getComputedStyle(document.documentElement);
          const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
          const rgb = (hex) => "rgb(" + channels(hex).join(",") + ")";
          return ["forward", "backward", "update", "wait", "exposed"]
            .filter((role) => seen.has(rgb(roles.getPropertyValue("--" + role).trim())));
        }"""
    )
    assert {"forward", "backward", "exposed"} <= set(colours)


def click_on(visit: Visit, role: str) -> dict[str, Any]:
    """Zooms to the longest interval of a role among the lanes in sight and clicks on it."""
    visit.page.evaluate(f"(() => {{ const e = {TIMELINE}; e.act(() => e.view.fit()); }})()")
    # A frame of an earlier window, which lacks intervals, may stay in sight for a while.
    visit.until(
        "source.view.t1 >= view.t1 && source.covers(source.view)"
        " && source.current.t0 <= 0 && source.current.t1 >= view.span"
    )
    target = visit.page.evaluate(
        """role => {
          const engine = document.getElementById("timeline").timeline;
          const frame = engine.source.current, number = engine.layout.roles.indexOf(role);
          const length = (i) => (i < 0 ? -1 : frame.end[i] - frame.start[i]);
          const { width, height } = engine.size();
          const shown = (i) => {
            const line = engine.scene.lineOfRow.get(frame.row[i]);
            return line && line.y + line.height - engine.view.scroll < height;
          };
          let best = -1;
          for (let i = 0; i < frame.n; i++) {
            if (frame.role[i] === number && length(i) > length(best) && shown(i)) best = i;
          }
          const line = engine.scene.lineOfRow.get(frame.row[best]);
          engine.act(() => engine.view.fitTo(frame.start[best], frame.end[best]));
          const y = line.y + line.height / 2 - engine.view.scroll;
          return { x: (width + 148) / 2, y, event: frame.event[best] };
        }""",
        role,
    )
    visit.page.locator(".tl-canvas").click(position={"x": target["x"], "y": target["y"]})
    return dict(target)


def test_a_click_shows_a_collective_on_every_rank(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    target = click_on(visit, "collective")
    visit.page.wait_for_selector(".details .part")
    assert visit.state("selected.event") == target["event"]
    ranks = ddltrace.open(SAMPLES[0]).ranks
    assert visit.page.locator(".details .part").count() == len(ranks)
    visit.until("props.flow.length > 1")
    # Another rank's part is one click away.
    visit.page.locator(".details .part").last.click()
    visit.until(f"selected.rank === {ranks[-1]}")
    visit.page.keyboard.press("Escape")
    visit.page.wait_for_selector(".details", state="hidden")
    assert visit.troubles == []


def test_a_click_on_the_critical_path_leads_to_its_event(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    visit.until("scene.path.rows > 0 && source.current.base.has(scene.path.row)")
    analyzed = analyze_in_full(ddltrace.open(SAMPLES[0]))
    lengths = {
        (piece.end_ns - piece.start_ns, piece.rank)
        for path in analyzed.paths.values()
        for piece in path
        if piece.category == "compute"
    }
    target = click_on(visit, "compute")
    visit.page.wait_for_selector(".details h2")
    assert visit.state("selected.rank") == -1
    assert visit.state("selected.event") == target["event"]
    length = visit.state("selected.end - selected.start")
    rank = next(rank for known, rank in lengths if known == length)
    assert length == max(lengths)[0]
    facts = visit.page.locator(".details dl").first.inner_text().split("\n")
    assert facts[facts.index("Rank") + 1] == str(rank)
    assert facts[facts.index("Category") + 1] == "compute"
    visit.page.locator(".details .goto").click()
    visit.until(f"selected.rank === {rank}")
    start, end = visit.state("[selected.start, selected.end]")
    assert end - start >= length
    # Another path is a key away, and what waits for a message shows it on every rank.
    click_on(visit, "transfer")
    visit.page.wait_for_selector(".details .part")
    visit.page.keyboard.press(".")
    visit.until("selected.rank === -1")
    assert visit.troubles == []


def test_a_question_is_asked_and_answered(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "what-if", viewport={"width": 700, "height": 900})
    visit.page.get_by_label("Faster").fill("compute=2")
    visit.page.keyboard.press("Tab")
    visit.page.click("#what-if-ask")
    visit.page.wait_for_selector("#what-if-result table")
    assert "compute=2" in visit.page.locator("#what-if-result tbody").inner_text()
    visit.page.wait_for_selector("#what-if-result .js-plotly-plot .main-svg")
    bar = visit.page.locator("#what-if-result .bars path").first
    read = "bar => getComputedStyle(bar).fill"
    before = bar.evaluate(read)
    visit.page.click("#switch-theme")
    visit.until_true(lambda: bar.evaluate(read) != before, "the figure follows the page")
    assert visit.fits()
    assert visit.barriers() == []
    visit.page.get_by_label("Faster").fill("compute")
    visit.page.keyboard.press("Tab")
    visit.page.click("#what-if-ask")
    visit.page.wait_for_selector("#what-if-result .warning")
    assert visit.troubles == []


def test_keys_go_from_event_to_event(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    click_on(visit, "backward")
    visit.until("selected && selected.end !== undefined")
    start = visit.state("selected.start")
    visit.page.keyboard.press(".")
    visit.until(f"selected.start > {start}")
    visit.page.keyboard.press(",")
    visit.until(f"selected.start === {start}")
    visit.page.keyboard.press("Escape")
    visit.until("selected === null")
    visit.page.keyboard.press(".")  # without a mouse, this selects the first
    visit.until("selected !== null")
    visit.page.keyboard.press("?")
    assert visit.page.locator(".tl-keys").is_visible()
    visit.page.keyboard.press("Escape")
    assert not visit.page.locator(".tl-keys").is_visible()
    assert visit.troubles == []


def test_labels_are_asked_for_once_however_long_they_take(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    visit.page.evaluate(
        """() => {
          const ask = window.fetch;
          window.asked = [];
          window.fetch = async (url, options) => {
            if (String(url).includes("/names?")) {
              window.asked.push(...new URL(url, location).searchParams.get("ids").split(","));
              await new Promise((done) => setTimeout(done, 250));
            }
            return ask(url, options);
          };
          document.getElementById("timeline").timeline.source.names.clear();
        }"""
    )
    visit.page.locator(".tl-canvas").hover(position={"x": 500, "y": 200})
    for key in "wswsw":
        visit.page.keyboard.press(key, delay=200)
    visit.until("source.names.size > 0 && source.wanted.size === 0")
    asked = visit.page.evaluate("window.asked")
    assert len(asked) > 1
    assert len(asked) == len(set(asked))
    assert visit.troubles == []


def test_a_hit_that_is_an_instant_is_shown_among_others(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    start = visit.page.evaluate(
        f"""() => {{
          const {{ source, layout, scene, view }} = {TIMELINE}, frame = source.current;
          const number = layout.roles.indexOf("gradient");
          const instant = (role, n) => role === number && frame.start[n] === frame.end[n];
          const i = frame.role.findIndex(instant);
          const track = scene.trackOfRow.get(frame.row[i]);
          const hit = {{ rank: track.rank, row: frame.row[i], event: frame.event[i],
                         start: frame.start[i], end: frame.end[i] }};
          view.set(hit.end + 1e6, hit.end + 9e6);
          Object.assign({TIMELINE}, {{ hits: [hit], total: 1 }});
          return hit.start;
        }}"""
    )
    visit.page.locator(".tl-canvas").focus()
    visit.page.keyboard.press("Enter")
    visit.until("selected")
    assert visit.state("view.width") == pytest.approx(8e6)
    assert visit.state("view.t0") < start < visit.state("view.t1")
    assert visit.troubles == []


def test_searching_and_stepping_through_the_hits(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    visit.page.keyboard.press("/")
    visit.page.keyboard.type("all_reduce")
    visit.until("hits.length > 1")
    assert "events" in visit.page.locator(".tl-found").inner_text()
    visit.until("source.current.found.size > 0")
    visit.page.keyboard.press("Enter")
    visit.until("selected")
    first = visit.state("selected.start")
    visit.page.keyboard.press("Enter")
    visit.until(f"selected.start > {first}")
    assert visit.page.locator(".tl-found").inner_text().startswith("2 of")
    visit.page.keyboard.press("Escape")
    visit.until("query === ''")
    assert visit.troubles == []


def measure(visit: Visit, start: int, end: int, timeline: str = "#timeline") -> None:
    """Drags from one place of the timeline to another with Shift held."""
    box = visit.page.locator(f"{timeline} .tl-canvas").bounding_box()
    visit.page.keyboard.down("Shift")
    visit.page.mouse.move(box["x"] + start, box["y"] + 100)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + end, box["y"] + 100, steps=4)
    visit.page.mouse.up()
    visit.page.keyboard.up("Shift")
    visit.page.wait_for_selector(".details h3")


def test_a_range_is_measured_inside_the_trace(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    measure(visit, 400, 20)
    assert visit.state("props.range[0]") == 0
    measure(visit, 600, 1279)
    visit.until("props.range[1] === Math.round(view.span)")
    assert visit.troubles == []


@pytest.mark.long
def test_a_cell_of_ranks_and_steps_opens_the_timeline(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "critical-path?trace=0&heat=wait")
    card = visit.page.locator("section", has=visit.page.get_by_text("Ranks and steps", exact=True))
    plot = card.locator(".js-plotly-plot")
    visit.until_true(
        lambda: plot.evaluate("plot => (plot.data || []).length > 0"), "the map is drawn"
    )
    shown = plot.evaluate(
        "plot => [plot._fullData[0].y, plot._fullData[0].x].map(axis => [...axis])"
    )
    of = ddltrace.open(SAMPLES[0]).analyze().rank_steps
    assert [len(axis) for axis in shown] == [len(set(of["rank"])), len(set(of["step"]))]
    assert "waiting for others" in plot.evaluate("plot => plot.data[0].hovertemplate")
    visit.figures()
    visit.page.wait_for_load_state("networkidle")
    area = plot.locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    visit.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.9 * box["height"], steps=4)
    plot.locator(".hovertext").wait_for()  # what is clicked is what was found to be beneath
    visit.page.wait_for_timeout(500)
    visit.page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.9 * box["height"])
    visit.timeline()
    last = max(of["rank"])
    visit.until(f"scene.pinned.has({last})")
    assert visit.state("view.width < 0.1 * view.span")
    assert visit.troubles == []


def test_pinned_rows_stay_while_others_are_scrolled_and_filtered(
    browser: Any, address: str
) -> None:
    visit = Visit(browser, address, "timeline", viewport={"width": 1280, "height": 600}).timeline()
    last = max(ddltrace.open(SAMPLES[0]).ranks)
    line = "scene.lines.find((each) => each.track.rank === {} && each.track.kind === 'compute')"
    head = visit.page.locator(".tl-canvas").bounding_box()
    visit.page.evaluate(
        f"{TIMELINE}.act(() => {{ {TIMELINE}.view.scroll = {TIMELINE}.scene.height; }})"
    )
    block = f"scene.blocks.find((each) => each.rank === {last})"
    y = visit.state(f"{block}.y - view.scroll")
    visit.page.mouse.click(head["x"] + 130, head["y"] + y + 12)
    visit.until(f"scene.pinned.has({last}) && {line.format(last)}.y < scene.pinnedHeight")
    visit.page.evaluate(f"{TIMELINE}.act(() => {{ {TIMELINE}.view.scroll = 90; }})")
    # An event is found where the pinned row is drawn, not where it would be scrolled to.
    y = visit.state(f"{line.format(last)}.y + {line.format(last)}.height / 2")
    hits = (
        f"(() => {{ const all = []; for (let x = 150; x < 1200; x += 3) {{"
        f"const item = {TIMELINE}.intervalAt(x, {y}); if (item) all.push(item.rank); }}"
        "return all; })()"
    )
    visit.until_true(lambda: set(visit.page.evaluate(hits)) == {last}, "events of the pinned rank")
    visit.page.fill(".tl-rows", "comm")
    visit.until("scene.lines.every((each) => ['communication', 'path'].includes(each.track.kind))")
    visit.page.get_by_text("Kinds").click()
    visit.page.get_by_label("Comm", exact=True).uncheck()
    visit.until("scene.lines.every((each) => each.track.kind === 'path')")
    visit.page.get_by_label("Comm", exact=True).check()
    visit.page.fill(".tl-rows", "0")
    visit.until_true(lambda: f"r%3A{last}___0" in visit.page.url, "the link has the rows")
    measure(visit, 400, 700)
    visit.page.locator(".details .table td", has_text="rank 0").wait_for()
    assert visit.page.locator(".details .table td", has_text=f"rank {last}").count() == 0
    visit.page.reload()
    visit.timeline()
    assert visit.state("[...scene.pinned]") == [last]
    assert visit.state("scene.wanted") == visit.page.input_value(".tl-rows") == "0"
    assert visit.barriers() == []
    assert visit.troubles == []


@pytest.mark.long
def test_a_mark_is_kept_and_travels_in_the_link(browser: Any, tmp_path: Path) -> None:
    for name in ("mine", "yours"):
        shutil.copytree(SAMPLES[0], tmp_path / name)
    note = "why here? <img src=x onerror=window.pwned=1>"

    def dashboard_of(name: str) -> Any:
        workspace = Workspace([ddltrace.open(tmp_path / name)])
        return running(create_app(workspace).server, bind("127.0.0.1", None))

    with dashboard_of("mine") as url:
        visit = Visit(browser, url, "timeline").timeline()
        box = visit.page.locator(".tl-canvas").bounding_box()
        visit.page.mouse.move(box["x"] + 600, box["y"] + 60)
        visit.page.keyboard.press("m")
        visit.page.get_by_label("Note").fill(note)
        visit.page.get_by_role("button", name="Save", exact=True).click()
        visit.until("marks.length === 1")
        visit.until_true(lambda: "m%3A" in visit.page.url, "the link has the mark")
        visit.until_true((tmp_path / "mine" / FILE).exists, "the mark is kept")
        link = visit.page.url.partition("#")[2]
        visit.page.goto(url + "?trace=0")
        visit.page.goto(url + "timeline?trace=0")
        visit.timeline()
        assert visit.state("marks[0].text") == note
        assert visit.barriers() == []
        assert visit.troubles == []
    with dashboard_of("yours") as url:
        visit = Visit(browser, url, f"timeline?trace=0#{link}").timeline()
        assert visit.state("marks[0].text") == note
        assert not (tmp_path / "yours" / FILE).exists()  # until the reader changes something
        x = visit.page.evaluate(f"{TIMELINE}.xOf({TIMELINE}.marks[0].t)")
        ruler = visit.page.locator(".tl-ruler").bounding_box()
        visit.page.mouse.click(ruler["x"] + x, ruler["y"] + 8)
        visit.page.get_by_role("button", name="Remove", exact=True).click()
        visit.until("marks.length === 0")
        assert visit.page.evaluate("window.pwned") is None
        assert visit.troubles == []


def test_measuring_a_range(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    measure(visit, 400, 700)
    assert visit.page.locator(".details h3").all_inner_texts() == [
        "Busy in this range",
        "What ran in it",
    ]
    # What is selected afterwards takes its place, for the key that fits, too.
    click_on(visit, "backward")
    visit.until("selected && selected.end !== undefined")
    visit.page.get_by_text("Busy in this range").wait_for(state="detached")
    visit.page.keyboard.press("s", delay=300)
    visit.page.keyboard.press("f")
    visit.until("view.t0 <= selected.start && selected.end <= view.t1")
    assert visit.state("view.width < 2 * (selected.end - selected.start)")
    assert visit.troubles == []


def test_links_restore_the_view(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline?trace=1").timeline()
    click_on(visit, "backward")
    visit.page.wait_for_selector(".details h2")
    visit.page.locator(".tl-search").fill("back~ward & 100%")
    visit.until("query !== ''")
    visit.until_true(lambda: "q%3A" in visit.page.url, "the search is in the link")
    visit.until_true(lambda: "s%3A" in visit.page.url, "the selection is in the link")
    shown = visit.state("[view.t0, view.t1]")
    heading = visit.page.locator(".details h2").inner_text()
    event = visit.state("selected.event")
    other = Visit(browser, "", visit.page.url).timeline()
    assert other.state("[view.t0, view.t1]") == pytest.approx(shown, rel=1e-6)
    assert other.state("selected.event") == event
    assert other.state("query") == "back~ward & 100%"
    other.page.wait_for_selector(".details h2")
    assert other.page.locator(".details h2").inner_text() == heading
    assert other.state("props.trace") == 1


def test_another_link_in_the_same_page_shows_its_view(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    click_on(visit, "backward")
    visit.until_true(lambda: "s%3A" in visit.page.url, "the selection is in the link")
    visit.page.evaluate("location.hash = 'v=t%3A1000000_3000000~q%3Aall_reduce~f%3Aall'")
    visit.until("view.t0 === 1e6 && view.t1 === 3e6")
    visit.until("query === 'all_reduce' && selected === null")
    assert visit.state("scene.folded.size") == visit.state("scene.ranks.length")
    visit.page.evaluate("location.hash = ''")
    visit.until("view.width >= view.span && query === '' && scene.folded.size === 0")
    assert visit.troubles == []


@pytest.mark.parametrize(
    "link",
    sampled(["v=nonsense", "v=t%3Aa_b", "v=t%3A9_1~q%3A%25E0", "v=s%3A9_9_9", "v=f%3A77"], 2),
)
def test_broken_links_show_everything(browser: Any, address: str, link: str) -> None:
    visit = Visit(browser, address, f"timeline#{link}").timeline()
    assert visit.state("view.width") >= visit.state("view.span")
    assert visit.troubles == []


def test_ranks_fold(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    visit.until("scene.path.known")
    tall = visit.state("scene.lines.length")
    head = {"x": 40, "y": visit.state("scene.blocks.find((b) => b.rank === 0).y") + 12}
    visit.page.locator(".tl-canvas").click(position=head)
    assert visit.state("scene.lines.length") < tall
    visit.page.locator(".tl-canvas").click(position=head)
    assert visit.state("scene.lines.length") == tall


@pytest.mark.parametrize("width", sampled(WIDTHS, 1))
def test_comparison(browser: Any, address: str, width: int) -> None:
    visit = Visit(browser, address, "compare?a=0&b=1", viewport={"width": width, "height": 900})
    for key in "ab":
        visit.timeline(f"#timeline-{key}")
    visit.page.evaluate(
        "() => { const a = document.getElementById('timeline-a').timeline;"
        "a.act(() => a.view.set(1e6, 9e6)); }"
    )
    other = "document.getElementById('timeline-b').timeline.view"
    assert visit.page.evaluate(f"[{other}.t0, {other}.t1]") == [1e6, 9e6]
    assert visit.barriers() == []
    for key in "ab":
        assert visit.page.locator(f"#timeline-{key} .tl-legend").is_visible()
        keys = visit.page.locator(f"#timeline-{key} .tl-keys").text_content()
        assert "Zoom" in keys
        assert "Measure" in keys
        assert "Mark a time" not in keys  # the page keeps no marks
    assert visit.figures() >= 3
    assert visit.fits()
    assert visit.troubles == []


def test_pages_are_reached_by_their_links(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "?trace=1")
    visit.page.wait_for_selector(".headline h1")
    visit.page.get_by_role("link", name="Timeline", exact=True).click()
    visit.timeline()
    assert visit.state("props.trace") == 1
    visit.page.get_by_role("link", name="Compare").click()
    visit.page.wait_for_selector(".compare-bar")
    visit.page.go_back()
    visit.timeline()
    # Through the comparison, whatever is chosen there, one comes back to the same trace.
    visit.page.get_by_role("link", name="Compare").click()
    choose(visit, "#compare-a", SAMPLES[-1].name)
    visit.until_true(lambda: "a=1&b=1" in visit.page.url, "the choice is in the address")
    visit.page.wait_for_selector(".compare-bar")
    visit.page.get_by_role("link", name="Timeline", exact=True).click()
    visit.timeline()
    assert visit.state("props.trace") == 1
    assert visit.troubles == []


@pytest.mark.long
def test_the_page_goes_on_where_the_tracks_of_a_comparison_end(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "compare?a=0&b=1").timeline("#timeline-a")
    visit.figures()
    canvas = visit.page.locator("#timeline-a .tl-canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 500, "y": 100})
    top = "document.getElementById('timeline-a').timeline.view.scroll"
    offset = "document.scrollingElement.scrollTop"
    before = visit.page.evaluate(offset)
    visit.page.mouse.wheel(0, 40)
    visit.until_true(lambda: visit.page.evaluate(top) == 40, "the tracks scroll")
    assert visit.page.evaluate(offset) == before
    for _ in range(8):
        visit.page.mouse.wheel(0, 2000)
        visit.page.wait_for_timeout(50)
    visit.until_true(lambda: visit.page.evaluate(offset) > before, "the page scrolls")
    assert visit.troubles == []


def choose(visit: Visit, chooser: str, title: str) -> None:
    """Chooses a trace from one of the page's lists."""
    visit.page.click(chooser)
    visit.page.locator(".dash-dropdown-option").filter(has_text=title).first.click()


def linked(visit: Visit, key: str) -> bool:
    """Whether the address holds the view of a timeline."""
    return f"{key}=t%3A" in visit.page.url.partition("#")[2]


def test_another_trace_is_chosen_on_its_timeline(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline").timeline()
    for number in (1, 0, 1):
        visit.until_true(lambda: linked(visit, "v"), "the view is in the link")
        choose(visit, "#trace", SAMPLES[-number].name)
        visit.until(f"props.trace === {number} && view")
        assert visit.page.url.startswith(f"{address}timeline?trace={number}")
        assert visit.state("view.width") >= visit.state("view.span")
    visit.page.go_back()
    visit.until("props.trace === 0")
    assert visit.troubles == []


@pytest.mark.long
def test_other_traces_are_chosen_for_a_comparison(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "compare")
    titles = {"a": SAMPLES[-1].name, "b": SAMPLES[0].name}
    for key, title in titles.items():
        for timeline in "ab":
            visit.timeline(f"#timeline-{timeline}")
            visit.until_true(lambda k=timeline: linked(visit, k), "the view is in the link")
        choose(visit, f"#compare-{key}", title)
        visit.page.locator(f"#timeline-{key}").locator("xpath=../h3").filter(
            has_text=title
        ).wait_for()
    assert "a=1&b=0" in visit.page.url.partition("#")[0]
    for timeline in "ab":
        visit.timeline(f"#timeline-{timeline}")
        visit.until_true(lambda k=timeline: linked(visit, k), "the view is in the link")
    assert visit.troubles == []


def test_evil_names_never_act(browser: Any, address: str) -> None:
    for path in ("?trace=2", "timeline?trace=2", "compare?a=2&b=0"):
        visit = Visit(browser, address, path)
        visit.page.wait_for_selector(".headline h1, .timeline[data-sharp]")
        if path.startswith("timeline"):
            visit.timeline()
            click_on(visit, "collective")
            visit.page.wait_for_selector(".details .part")
            visit.page.locator(".tl-canvas").hover(position={"x": 600, "y": 60})
        else:
            visit.page.wait_for_selector(".graph svg.main-svg")
        visit.page.wait_for_load_state("networkidle")
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("img[src=x]").count() == 0
        assert visit.fits()
        assert visit.troubles == []


@pytest.mark.parametrize(
    "path",
    sampled(
        [
            "tensors",
            "communication",
            "critical-path?step=5",
            "traces",
            "sql?q=SELECT%20name,bytes%20FROM%20tensors",
        ],
        3,
    ),
)
def test_further_pages(browser: Any, address: str, path: str) -> None:
    """Pages of a real trace and of the trace of evil names: complete, in order, and harmless."""
    for number, theme in ((0, "light"), (2, "dark")):
        separator = "&" if "?" in path else "?"
        visit = Visit(browser, address, f"{path}{separator}trace={number}", color_scheme=theme)
        name = path.split("?", maxsplit=1)[0]
        visit.page.wait_for_selector(f"main[data-page={name}]")
        if name == "sql":
            visit.page.get_by_role("button", name="Run").click()
        if name != "traces":
            visit.page.wait_for_selector(".graph svg.main-svg")
        visit.page.wait_for_load_state("networkidle")
        assert visit.page.locator("main .table tbody tr, main .grid .ag-row").count() > 0
        assert visit.page.evaluate("window.pwned") is None
        assert visit.page.locator("img[src=x]").count() == 0
        assert visit.fits()
        assert visit.barriers() == []
        assert visit.troubles == []


@pytest.mark.long
def test_the_slack_of_a_large_trace_comes_after_its_page(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_trace, "FEWEST_EVENTS", 1)
    shutil.copytree(SAMPLES[-1], tmp_path / "trace")
    workspace = Workspace([ddltrace.open(tmp_path / "trace")])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "critical-path")
        card = visit.page.locator("section", has=visit.page.get_by_text("Slack", exact=True))
        card.locator(".grid .ag-cell").first.wait_for()
        rows = Grid(visit, "slack")
        assert rows.count() == len(workspace.get(0).slack) > LONGEST_TABLE
        card.get_by_text("smallest slack", exact=True).click()
        slack = rows.values(5)
        assert slack == sorted(slack, reverse=True)
        assert visit.troubles == []


@pytest.mark.long
def test_timelines_are_aligned_at_a_chosen_step(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "compare?a=0&b=1")
    visit.timeline("#timeline-a").timeline("#timeline-b")
    field = visit.page.get_by_label("Align at step")
    field.fill("3")
    field.press("Enter")
    visit.page.get_by_text("Time runs from the start of step 3.").wait_for()
    assert "step=3" in visit.page.url
    visit.timeline("#timeline-a").timeline("#timeline-b")
    engines = [f"document.getElementById('timeline-{key}').timeline" for key in "ab"]

    def begins() -> list[float]:
        return [visit.page.evaluate(f"{each}.view.t0 - {each}.shift") for each in engines]

    visit.until_true(lambda: begins()[0] == pytest.approx(begins()[1]), "one axis")
    # What one shows, the other shows, seen from the start of the step.
    zoom = "a.act(() => a.view.zoom(0.1, a.shift))"
    visit.page.evaluate(f"(() => {{ const a = {engines[0]}; {zoom}; }})()")
    visit.until_true(lambda: begins()[0] == pytest.approx(begins()[1]), "one axis when zoomed")
    for each, path in zip(engines, (SAMPLES[0], SAMPLES[-1]), strict=True):
        trace = ddltrace.open(path)
        starts = [
            row["start_ns"]
            for rank in trace.ranks
            for row in trace.events(rank).select(["kind", "step", "start_ns"]).to_pylist()
            if row["kind"] == "step" and row["step"] == 3
        ]
        assert visit.page.evaluate(f"{each}.shift") == min(starts) - trace.origin_ns
    assert visit.troubles == []


@pytest.mark.long
def test_two_traces_are_compared_in_a_range_that_a_link_shares(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "compare?a=0&b=1&step=3")
    field = visit.page.get_by_label("of B at step")
    field.fill("5")
    field.press("Enter")
    visit.page.get_by_text("start of step 3 of A and step 5 of B").wait_for()
    assert "step_b=5" in visit.page.url
    visit.timeline("#timeline-a").timeline("#timeline-b")
    panel = visit.page.locator("#range-difference")
    walls = []
    for path, step in ((SAMPLES[0], 3), (SAMPLES[-1], 5)):
        trace = ddltrace.open(path)
        rows = [row for rank in trace.ranks for row in trace.events(rank).to_pylist()]
        own = [row for row in rows if row["kind"] == "step" and row["step"] == step]
        walls.append(max(row["end_ns"] for row in own) - min(row["start_ns"] for row in own))
    panel.get_by_text("Step time").wait_for()
    shown = panel.locator("tbody tr").first.locator("td").all_inner_texts()
    assert shown == [
        "step 3 and step 5",
        *(time_text(wall / 1e3) for wall in walls),
        change_text((walls[1] - walls[0]) / 1e3),
    ]
    # At first the longer of both steps is shown.
    engines = [f"document.getElementById('timeline-{key}').timeline" for key in "ab"]
    width = visit.page.evaluate(f"{engines[0]}.view.width")
    assert width == pytest.approx(1.1 * max(walls), rel=0.01)
    visit.page.locator("#timeline-b").scroll_into_view_if_needed()
    measure(visit, 300, 500, "#timeline-b")
    panel.get_by_text("measured range").wait_for()
    ranges = [visit.page.evaluate(f"{each}.range.map(t => t - {each}.shift)") for each in engines]
    assert ranges[0] == pytest.approx(ranges[1], abs=1)
    assert visit.barriers() == []
    visit.until_true(lambda: "x%3A" in visit.page.url, "the range is in the link")
    numbers = panel.inner_text()
    other = Visit(browser, "", visit.page.url)
    other.timeline("#timeline-a").timeline("#timeline-b")
    other.page.get_by_text("measured range").wait_for()
    other.until_true(
        lambda: other.page.locator("#range-difference").inner_text() == numbers, "the same panel"
    )
    assert visit.troubles == []


@pytest.mark.long
def test_a_page_is_saved_as_one_file_that_needs_nothing(
    browser: Any, address: str, tmp_path: Path
) -> None:
    """With names that are attacks, and all figures and timelines in it."""
    for number, path in enumerate(("?trace=2", "compare?a=2&b=0")):
        visit = Visit(browser, address, path)
        visit.figures()
        timelines = visit.page.locator(".timeline").count()
        for key in "ab"[:timelines]:
            visit.timeline(f"#timeline-{key}")
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name="Save page as HTML").click()
        saved = tmp_path / f"{number}.html"
        download.value.save_as(saved)
        figures = visit.page.locator(".graph").count()
        alone = Visit(browser, "file://", str(saved))
        assert alone.page.locator("img").count() == figures + timelines
        assert alone.page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        assert alone.page.locator("h1").inner_text() == visit.page.locator("h1").inner_text()
        assert alone.page.evaluate("window.pwned") is None
        assert alone.page.locator("script, button, [href], [onerror]").count() == 0
        assert alone.troubles == visit.troubles == []


@pytest.mark.long
def test_figures_and_timelines_are_saved_as_images(
    browser: Any, address: str, tmp_path: Path
) -> None:
    def saved(visit: Visit, button: str) -> bytes:
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name=button).first.click()
        download.value.save_as(tmp_path / "image")
        return (tmp_path / "image").read_bytes()

    visit = Visit(browser, address, "?trace=2")
    visit.figures()
    assert saved(visit, "Save this figure as PNG").startswith(b"\x89PNG")
    assert ET.fromstring(saved(visit, "Save this figure as SVG")).tag.endswith("}svg")
    visit = Visit(browser, address, "timeline?trace=2").timeline()
    picture = ET.fromstring(saved(visit, "Save what is shown as an SVG image"))
    svg = "{http://www.w3.org/2000/svg}"
    assert "Rank 0" in [node.text for node in picture.iter(f"{svg}text")]
    assert sum(1 for _ in picture.iter(f"{svg}rect")) > 500
    assert visit.troubles == []


def csv_rows(path: Path) -> list[list[str]]:
    """The cells of a CSV file."""
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines(keepends=True)))


def as_shown(cell: str) -> str | float:
    """A cell of the page or of a CSV file, in which numbers have more digits."""
    if cell in ("", "null"):
        return "null"
    try:
        return float(f"{float(cell):.3g}")
    except ValueError:
        return cell


def test_a_statement_is_run_and_a_tensor_is_followed(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "sql?trace=0")
    # Each statement differs from the one that the page shows: the page of the link has come when
    # its statement is there. The page begins with the first.
    for title, statement in (*EXAMPLES[1:], EXAMPLES[0]):
        assert visit.page.input_value("#sql-text") != statement
        visit.page.get_by_role("link", name=title, exact=True).click()
        visit.until_true(lambda s=statement: visit.page.input_value("#sql-text") == s, title)
        assert visit.page.locator("#sql-result > *").count() == 0  # an address runs nothing
        visit.page.get_by_role("button", name="Run").click()
        visit.page.locator("#sql-result .table").wait_for()  # few rows
        assert visit.page.locator("#sql-result .warning").count() == 0
        with visit.page.expect_download() as download:
            visit.page.get_by_role("button", name="Save CSV").click()
        saved = csv_rows(download.value.path())
        shown = visit.page.evaluate(
            "[...document.querySelectorAll('#sql-result tr')]"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )
        assert [list(map(as_shown, row)) for row in saved] == [
            list(map(as_shown, row)) for row in shown
        ]
    visit.page.fill("#sql-text", "SELECT count(*) AS n FROM nowhere")
    visit.page.get_by_role("button", name="Save CSV").click()
    visit.page.get_by_role("alert").get_by_text("nowhere").first.wait_for()
    visit.page.fill("#sql-text", "SELECT count(*) AS n FROM steps")
    visit.page.get_by_role("button", name="Run").click()
    visit.page.get_by_text("1 row", exact=True).wait_for()
    assert "q=SELECT" in visit.page.url
    visit.page.get_by_role("link", name="Tensors", exact=True).click()
    visit.page.locator("main .table td a").first.click()
    visit.page.locator("main").get_by_role("link", name="timeline").first.click()
    visit.timeline()
    # The timeline shows the message, not the whole trace.
    assert visit.state("view.width") < visit.state("view.span") / 10
    assert visit.troubles == []


@pytest.mark.long
def test_many_rows_are_a_grid(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "sql?trace=0")
    statement = "SELECT name, end_ns - start_ns AS ns, rank FROM events WHERE end_ns > start_ns"
    visit.page.fill("#sql-text", statement)
    asked = time.monotonic()
    visit.page.press("#sql-text", "Control+Enter")
    visit.page.locator("#sql-result .grid .ag-cell").first.wait_for()
    assert time.monotonic() - asked < GRID_SECONDS
    grid = Grid(visit, "sql")
    events = grid.count()
    assert events > 1000
    assert 0 < visit.page.locator(".grid .ag-row").count() < 100  # only these are drawn
    visit.page.locator(".grid .ag-header-cell", has_text="ns").first.click()
    lengths = grid.values(1)
    assert lengths == sorted(lengths, reverse=True)
    visit.page.get_by_label("rank Filter Input").locator("visible=true").fill("1")
    visit.until_true(lambda: set(grid.values(2)) == {1}, "rows of rank 1")
    assert 0 < grid.count() < events
    with visit.page.expect_download() as download:
        visit.page.locator("#sql-result .save-csv").click()
    heads, *saved = csv_rows(download.value.path())
    assert heads == ["name", "ns", "rank"]
    assert [float(row[1]) for row in saved] == grid.values(1)
    assert visit.barriers() == []
    assert visit.troubles == []


def test_a_link_in_a_grid_needs_no_new_page(browser: Any, tmp_path: Path) -> None:
    workspace = Workspace([ddltrace.open(ROOT / "sample_traces" / "gpu-2-ranks")])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "tensors")
        link = visit.page.locator(".grid .ag-row a").first
        link.wait_for()
        name = link.text_content()
        visit.page.evaluate("window.same = true")
        link.click()
        visit.page.locator("main h2", has_text=name).first.wait_for()
        assert "tensor=" in visit.page.url
        assert visit.page.evaluate("window.same")
        assert visit.troubles == []


@pytest.mark.long
def test_an_experiment_under_way_fills_its_page(browser: Any, tmp_path: Path) -> None:
    """The page of a running experiment shows a row soon after it was written."""
    source = ROOT / "sample_traces" / "experiment-400mbit" / "results.json"
    finished = json.loads(source.read_text(encoding="utf-8"))
    under_way = finished | {"status": "running", "rows": finished["rows"][:2]}
    results = tmp_path / "results.json"
    results.write_text(json.dumps(under_way), encoding="utf-8")
    workspace = Workspace([], [OpenExperiment(0, "experiment", tmp_path)])
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "experiments", viewport={"width": 1366, "height": 768})
        visit.page.wait_for_selector("main[data-page=experiments] .graph svg.main-svg")
        table = visit.page.locator("main .table tbody tr")
        assert table.count() == 2
        results.write_text(json.dumps(finished), encoding="utf-8")
        visit.until_true(lambda: table.count() == len(finished["rows"]), "all rows are there")
        # The table fits; the columns that it hides are in its CSV file.
        box = visit.page.locator(".strategies .table")
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
        heads = visit.page.locator(".strategies th:visible")
        few = heads.count()
        with visit.page.expect_download() as download:
            visit.page.locator(".strategies .save-csv").click()
        saved = csv_rows(download.value.path())
        assert len(saved) == 1 + len(finished["rows"])
        visit.page.get_by_role("link", name="4 more columns").click()
        visit.until_true(lambda: heads.count() == few + 4, "all columns are shown")
        assert saved[0] == heads.all_inner_texts()
        assert visit.barriers() == []
        visit.page.wait_for_load_state("networkidle")
        assert visit.troubles == []


def test_an_empty_trace_says_so(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "timeline?trace=3")
    visit.page.get_by_text("This trace holds no events").wait_for()
    visit.page.goto(address + "?trace=3")
    visit.page.get_by_text("Nothing was measured").wait_for()
    assert visit.troubles == []


def test_what_is_not_there_says_so(browser: Any, address: str) -> None:
    visit = Visit(browser, address, "?trace=99")
    visit.page.get_by_text("this dashboard has no trace 99").wait_for()
    # The list of traces comes by another answer than the page.
    visit.page.wait_for_function(
        "name => !document.querySelector('#trace').innerText.includes(name)",
        arg=SAMPLES[0].name,
    )
    choose(visit, "#trace", SAMPLES[0].name)
    visit.page.wait_for_selector(".headline h1")
    visit.page.goto(address + "nowhere")
    visit.page.get_by_text("There is no such page").wait_for()
    assert visit.troubles == []


def test_a_server_that_went_away_is_told_of(browser: Any) -> None:
    workspace = Workspace([ddltrace.open(SAMPLES[0])])
    port = free_port()
    with running(create_app(workspace).server, bind("127.0.0.1", port)) as url:
        visit = Visit(browser, url, "timeline").timeline()
    visit.page.keyboard.press("w", delay=300)
    gone = visit.page.get_by_text("The server of this page has ended, or does not answer.")
    gone.wait_for()
    assert f"To open it again: ddltrace dashboard {SAMPLES[0]}" in gone.inner_text()
    with running(create_app(workspace).server, bind("127.0.0.1", port)):
        visit.page.keyboard.press("s", delay=300)
        gone.wait_for(state="detached")
    visit.page.get_by_role("link", name="Overview").click()
    gone.wait_for()


@pytest.mark.long
def test_only_the_printed_address_opens_pages(browser: Any) -> None:
    command = [sys.executable, "-m", "ddltrace", "dashboard", str(SAMPLES[0]), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        printed = server.stdout.readline().split()[1]
        url = printed.partition("?")[0]
        visit = Visit(browser, url, "")
        visit.page.get_by_text("This dashboard needs its token").wait_for()
        # As a browser is started: with a file that leads to the address.
        visit.page.goto(_leading_to(printed).as_uri())
        visit.page.wait_for_selector("main[data-page=overview]")
        assert "token" not in visit.page.url
        assert "token" not in visit.page.inner_html("nav")
        visit.page.get_by_role("link", name="Timeline", exact=True).click()
        visit.timeline().page.reload()
        assert visit.timeline().page.url.startswith(url)
        assert all("403" in trouble or "file:" in trouble for trouble in visit.troubles)
        visit.page.context.clear_cookies()
        visit.page.keyboard.press("w", delay=300)
        visit.page.get_by_text("This page needs the token of its server").wait_for()
        server.terminate()


def test_a_command_of_a_trace_is_run_only_after_it_was_seen(browser: Any, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES[0], tmp_path / "trace")
    run = json.loads((tmp_path / "trace" / "run.json").read_text(encoding="utf-8"))
    command = [sys.executable, "-c", "'<img src=x>'", "\x1b[31m", "y" * 3000]
    (tmp_path / "trace" / "run.json").write_text(json.dumps(run | {"command": command}))
    runs = AllowedRuns(tmp_path / "results")
    workspace = Workspace([ddltrace.open(tmp_path / "trace")], (), runs)
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "experiments?job=trace:0")
        visit.page.get_by_label("the command of").check()
        for button, starts in (("Do not run it", False), ("Run this command", True)):
            visit.page.get_by_role("button", name="Start the experiment").click()
            dialog = visit.page.locator("dialog.confirm")
            dialog.wait_for()
            words = dialog.locator("li").all_inner_texts()
            assert [len(words), words[3], words[4]] == [5, r"'\x1b[31m'", "y" * 3000]
            assert runs.control.state() is None
            dialog.get_by_role("button", name=button).click()
            if starts:
                visit.until_true(lambda: runs.control.state() is not None, "it runs")
    runs.control.close()


@pytest.mark.long
def test_an_experiment_is_started_and_cancelled_from_its_page(browser: Any, tmp_path: Path) -> None:
    """From a finding to the form, to the first row, to a cancelled run of which nothing is left."""
    runs = AllowedRuns(tmp_path / "results")
    workspace = Workspace([ddltrace.open(SAMPLES[0])], (), runs)
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        visit = Visit(browser, url, "")
        visit.page.get_by_role("link", name="Test it in an experiment").first.click()
        text = visit.page.locator("#run-strategies")
        text.wait_for()
        assert text.input_value().splitlines()[0] == "ddp"
        text.fill("ddp")
        visit.page.locator("#run-form summary", has_text="order").click()
        visit.page.get_by_role("button", name="Add as a strategy of its own: wfbp").click()
        visit.until_true(lambda: text.input_value() == "ddp\nwfbp", "the technique is added")
        visit.page.get_by_label("gpt:").check()
        for field, value in (("steps", "12"), ("warmup", "2"), ("repeats", "50")):
            visit.page.fill(f"#run-{field}", value)
        visit.page.get_by_role("button", name="Start the experiment").click()
        rows = visit.page.locator("#experiment-results .table tbody tr")
        rows.first.wait_for()
        visit.page.get_by_text("of 100 runs are done").first.wait_for()
        # A second run is refused while the first is under way.
        if not visit.page.locator("#run-form[open]").count():
            visit.page.locator("#run-form > summary").click()
        visit.page.get_by_label("gpt:").check()
        visit.page.get_by_role("button", name="Start the experiment").click()
        visit.page.get_by_text("an experiment runs already").wait_for()
        process = psutil.Process(runs.control._process.pid)
        below = process.children(recursive=True)
        assert below
        visit.page.get_by_role("button", name="Cancel the run").click()
        visit.page.get_by_text("The experiment was cancelled").wait_for()
        runs.control.close()
        _, left = psutil.wait_procs([process, *below], timeout=60)
        assert left == []
        (directory,) = (path for path in runs.control.folder.iterdir() if path.is_dir())
        results = json.loads((directory / "results.json").read_text(encoding="utf-8"))
        assert results["status"] == "interrupted"
        assert results["rows"][0]["runs"][0]["status"] == "complete"
        refused = [text for text in visit.troubles if "409" not in text]
        assert refused == []


@pytest.mark.long
def test_three_traces_are_compared_and_tables_and_timelines_are_saved(
    browser: Any, address: str, tmp_path: Path
) -> None:
    visit = Visit(browser, address, "compare?a=0&b=1")
    matrix = visit.page.locator("section", has=visit.page.get_by_text("All traces", exact=True))
    matrix.wait_for()
    assert matrix.locator("tbody tr").count() == 4
    with visit.page.expect_download() as download:
        matrix.get_by_role("button", name="Save as CSV").click()
    download.value.save_as(tmp_path / "matrix.csv")
    rows = list(csv.reader((tmp_path / "matrix.csv").open(encoding="utf-8", newline="")))
    assert [len(row) for row in rows] == [6] * 5
    assert [row[0] for row in rows[1:3]] == [SAMPLES[0].name, SAMPLES[-1].name]
    differences = visit.page.locator("section", has=visit.page.get_by_text("What differs"))
    differences.get_by_role("link", name="B", exact=True).first.click()
    visit.timeline()
    assert "trace=1" in visit.page.url
    with visit.page.expect_download() as download:
        visit.page.get_by_role("button", name="Save what is shown as a PNG image").click()
    download.value.save_as(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert visit.troubles == []
