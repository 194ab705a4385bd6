"""The HTML report: whole, self-contained, and safe whatever the names in the trace are."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.measures.collectives import P2PRow
from ddltrace.analyzer.measures.path_parts import CopyTimes, PathTotals
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.open_trace import Trace
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.html_page import json_in_html
from ddltrace.analyzer.report.html_report import render, write_html
from ddltrace.tracer.errors import DdltraceError

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '" onmouseover="window.pwned=1',
    "\x1b[31mred\x1b[0m \N{RIGHT-TO-LEFT OVERRIDE}txt",
    "{{ 7 * 7 }} %{y}",
)
STEPS = 4
STEP_US = 1_000


@pytest.fixture
def trace(build: Any) -> Trace:
    """Two ranks, four steps; rank 1 enters the all_reduce of each 200 us late. Evil names."""
    builder = build(2, name="evil <b>name</b>")
    builder.notes.append(f"a note {HOSTILE[0]}")
    tensors = [builder.tensor(name, 4_000 * (n + 1)) for n, name in enumerate(HOSTILE)]
    for rank in (0, 1):
        ours = builder[rank]
        for step in range(STEPS):
            start = step * STEP_US
            ours.step = step
            late = 200 * rank
            ours.add("phase", start + 10, start + 300 + late, name="forward", phase="forward")
            ours.add("layer", start + 20, start + 290 + late, name=HOSTILE[rank], phase="forward")
            message = ours.message(
                "all_reduce",
                start + 300 + late,
                start + 800,
                seq=step,
                bytes=60_000,
                out_bytes=60_000,
                tensors=tensors,
                phase="backward",
            )
            ours.wait(start + 310 + late, start + 800, message, phase="backward")
            for tensor in tensors:
                ours.add(
                    "gradient",
                    start + 290 + late,
                    start + 290 + late,
                    tensors=[tensor],
                    phase="backward",
                )
            ours.add("phase", start + 800, start + 900, name="optimizer", phase="optimizer")
            ours.whole_step(step, start, start + STEP_US)
    return builder.trace()


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, text, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self._open: list[str] = []
        self._script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._open.append(tag)
        if tag == "script":
            self._script = attributes.get("id") or f"script {len(self.scripts)}"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[self._script] += data
        elif not self._open or self._open[-1] != "style":
            self.text += data


@pytest.fixture
def page(trace: Trace) -> Page:
    return Page(render(analyze_in_full(trace), trace))


def test_names_are_text_and_nothing_else(page: Page) -> None:
    for name in HOSTILE[:3]:
        assert name in page.text
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"img", "iframe", "object", "b>"})
    assert [tag for tag, _ in page.elements].count("script") == 4
    attributes = {name for _, found in page.elements for name in found}
    assert not [name for name in attributes if name.startswith("on")]
    assert "\x1b" not in page.text
    assert r"\x1b[31mred" in page.text
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in page.text
    assert "{{ 7 * 7 }}" in page.text


def test_names_in_figures_hold_no_markup(page: Page) -> None:
    """plotly reads tags in labels, so what it is given has none."""
    data = json.loads(page.scripts["data"])

    def strings(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        children = value.values() if isinstance(value, dict) else value
        return (
            [text for child in children for text in strings(child)]
            if isinstance(value, dict | list)
            else []
        )

    texts = strings(data)
    ours = ("<br>", "<extra>", "</extra>")
    for text in texts:
        for tag in ours:
            text = text.replace(tag, "")  # noqa: PLW2901
        assert "<" not in text
    escaped = html.escape(HOSTILE[1], quote=False)
    assert any(escaped in text for text in texts), "the hostile layer is on the critical path"


def test_data_cannot_leave_its_script() -> None:
    value = {name: [name] for name in HOSTILE}
    text = json_in_html(value)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_asks_for_nothing_from_outside(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in {"link", "base"}
        assert not {"src", "href", "action", "srcset"} & set(attributes)
    policies = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert policies == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data: blob:"
    ]


def test_carries_plotly(page: Page) -> None:
    script = gzip.decompress(base64.b64decode(page.scripts["plotly"]))
    assert b"plotly.js v" in script[:200]
    assert len(page.scripts["plotly"]) < 3_000_000


def test_chart_of_steps_sums_to_their_wall_times(trace: Trace) -> None:
    analysis = trace.analyze()
    figure = figures.step_times(analysis)
    assert figure is not None
    sums = np.sum([bar.y for bar in figure.data], axis=0)
    assert sums == pytest.approx([row.wall_us / 1e3 for row in analysis.steps])
    assert len(analysis.steps) == STEPS


def test_breakdown_of_ranks_sums_to_their_spans(trace: Trace) -> None:
    analysis = trace.analyze()
    figure = figures.rank_breakdown(analysis)
    assert figure is not None
    sums = np.sum([bar.x for bar in figure.data], axis=0)
    assert sums == pytest.approx([(row.span_us or 0) / 1e3 for row in analysis.ranks])


def test_paths_shown_sum_to_their_steps(page: Page, trace: Trace) -> None:
    data = json.loads(page.scripts["data"])
    steps = {str(row.step): row for row in trace.analyze().steps}
    assert set(data["paths"]) == set(steps)
    for step, path in data["paths"].items():
        assert sum(path["ms"]) == pytest.approx(steps[step].wall_us / 1e3)
        starts = np.array(path["start_ms"])
        assert starts[0] == 0
        assert starts[1:] == pytest.approx(np.cumsum(path["ms"])[:-1])
        for category, name in zip(path["category"], path["name"], strict=True):
            assert CATEGORIES[category]
            assert data["names"][name]


def test_late_rank_is_shown(page: Page, trace: Trace) -> None:
    figure = json.loads(page.scripts["data"])["figures"]["stragglers"]
    assert figure["data"][0]["y"][0] == "rank 1"
    assert "wait_against_transfer" in json.loads(page.scripts["data"])["figures"]


def test_many_steps_are_averaged_not_dropped(trace: Trace) -> None:
    count = 1_001
    walls = np.arange(1.0, count + 1)
    rows = tuple(
        StepRow(
            step=n,
            start_us=0.0,
            wall_us=wall,
            ranks=1,
            steady=True,
            overlap_ratio=None if n % 2 else 0.5,
            compute_share=None,
            exposed_comm_share=None,
            idle_share=None,
            critical_path=PathTotals(wall, wall, *[0.0] * 7),
            copies=CopyTimes(*[0.0] * 6),
        )
        for n, wall in enumerate(walls.tolist())
    )
    analysis = dataclasses.replace(trace.analyze(), steps=rows)
    figure = figures.step_times(analysis)
    assert figure is not None
    (bars,) = figure.data
    width = -(-count // figures.MAX_BARS)
    assert len(bars.y) == -(-count // width) <= figures.MAX_BARS
    means = [walls[n : n + width].mean() / 1e3 for n in range(0, count, width)]
    assert bars.y == pytest.approx(means)
    assert f"means of {width} neighbours" in figure.layout.xaxis.title.text
    shares = figures.overlap_over_steps(analysis)
    assert shares is not None
    (line,) = shares.data
    assert line.y == pytest.approx([0.5] * len(means)), "unknown steps do not count as zero"


@pytest.mark.parametrize("world_size", [3, 1_000])
def test_traffic_matrix_keeps_every_byte(trace: Trace, world_size: int) -> None:
    rows = tuple(
        P2PRow(rank, (rank + 1) % world_size, 1, 1_024 * (rank + 1), None, None, 0)
        for rank in range(world_size)
    )
    figure = figures.traffic(dataclasses.replace(trace.analyze(), p2p=rows))
    assert figure is not None
    (matrix,) = figure.data
    assert np.nansum(matrix.z, dtype=np.float64) == sum(row.bytes for row in rows)
    assert len(matrix.z) == len(matrix.x) == len(matrix.y) <= figures.MAX_CELLS
    assert matrix.x[0] == ("rank 0" if world_size == 3 else "ranks 0 to 3")
    if world_size == 3:
        assert list(matrix.text[0]) == ["", "1.02 kB", ""]


@pytest.fixture
def bare(build: Any) -> Trace:
    """One rank that recorded one layer: no steps, no messages, no tensors."""
    builder = build(1)
    builder[0].add("layer", 0, 10, name="alone")
    return builder.trace()


def test_what_is_not_known_is_left_out(bare: Trace) -> None:
    analyzed = analyze_in_full(bare)
    page = Page(render(analyzed, bare))
    drawn = json.loads(page.scripts["data"])["figures"]
    assert "step_times" not in drawn
    assert "stragglers" not in drawn
    assert "traffic" not in drawn
    assert analyzed.analysis.summary.overlap_ratio is None
    assert "overlap ratio" in page.text
    assert "nan" not in page.text.lower()
    assert "None" not in page.text


def test_losses_are_said_before_the_numbers(trace: Trace) -> None:
    analyzed = analyze_in_full(trace)
    facts = dataclasses.replace(
        analyzed.analysis.trace, world_size=3, dropped=1_234, notes=("rank 2 fell silent",)
    )
    changed = dataclasses.replace(analyzed.analysis, trace=facts)
    text = Page(render(dataclasses.replace(analyzed, analysis=changed), trace)).text
    assert text.index("rank 2 fell silent") < text.index("step, mean")
    assert "1,234 events dropped" in text
    assert "no record of rank 2" in text


def test_hang_comes_first(build: Any) -> None:
    builder = build(2)
    for rank in (0, 1):
        builder[rank].whole_step(0, 0, 100)
    builder[0].message("all_reduce", 150, None, seq=0, bytes=4)
    builder[1].add("layer", 150, 900, name=HOSTILE[1])
    trace = builder.trace()
    text = re.sub(r"\s+", " ", Page(render(analyze_in_full(trace), trace)).text)
    assert (
        "The job hangs. all_reduce number 0 of group 0 hangs: rank 0 entered it for at least"
        in text
    )
    assert "rank 1 never did" in text
    assert text.index("The job hangs") < text.index("step, mean")


def test_writes_whole_or_not_at_all(trace: Trace, tmp_path: Path) -> None:
    analyzed = analyze_in_full(trace)
    target = tmp_path / "report.html"
    target.write_text("before", encoding="utf-8")
    write_html(analyzed, trace, target)
    text = target.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
    with pytest.raises(DdltraceError, match=re.escape(str(tmp_path / "no" / "r.html"))):
        write_html(analyzed, trace, tmp_path / "no" / "r.html")
    with pytest.raises(DdltraceError, match="cannot be written"):
        write_html(analyzed, trace, tmp_path)
    assert list(tmp_path.parent.glob("*.tmp")) == list(tmp_path.parent.glob(".*.tmp")) == []
