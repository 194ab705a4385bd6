"""The HTML report in a real Chromium: drawn, coloured, without network, deaf to evil names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from support.pages import new_page

import ddltrace
from ddltrace.analyzer.analysis import analyze_in_full
from ddltrace.analyzer.report.html_report import write_html

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = sorted(path.parent for path in (ROOT / "sample_traces").glob("*/run.json"))
HOSTILE = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"


@dataclasses.dataclass
class Opened:
    """A report in the browser, and what went wrong or out while it was there."""

    page: Any
    troubles: list[str]


def show(browser: Any, report: Path, *, theme: str = "light") -> Opened:
    """Opens a report and waits until its figures are drawn."""
    page = new_page(browser, viewport={"width": 1280, "height": 900}, color_scheme=theme)
    opened = Opened(page, [])
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "data:", "blob:"))
            else opened.troubles.append(f"asked for {request.url}")
        ),
    )
    page.on("pageerror", lambda error: opened.troubles.append(f"error {error}"))
    page.on(
        "console",
        lambda message: (
            opened.troubles.append(f"console: {message.text}") if message.type == "error" else None
        ),
    )
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]")
    return opened


def write_report(source: Path, target: Path, /, **changes: Any) -> Path:
    opened = ddltrace.open(source)
    analyzed = analyze_in_full(opened)
    analysis = dataclasses.replace(analyzed.analysis, **changes)
    write_html(dataclasses.replace(analyzed, analysis=analysis), opened, target)
    return target


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(SAMPLES[0], tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.parametrize("trace", SAMPLES, ids=lambda path: path.name)
def test_every_figure_is_drawn_without_network(browser: Any, trace: Path, tmp_path: Path) -> None:
    opened = show(browser, write_report(trace, tmp_path / "report.html"))
    figures = opened.page.locator(".figure")
    assert figures.count() >= 6
    for number in range(figures.count()):
        assert figures.nth(number).locator("svg.main-svg").count() > 0
    assert opened.troubles == []
    # Nothing is wider than the window.
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_theme_is_the_systems_until_one_is_chosen(browser: Any, report: Path, theme: str) -> None:
    page = show(browser, report, theme=theme).page
    other = {"light": "dark", "dark": "light"}[theme]
    bar = '.figure[data-figure="step_times"] .bars path'

    def colours() -> tuple[str, str]:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return ground, page.locator(bar).first.evaluate("bar => getComputedStyle(bar).fill")

    assert page.locator("html").get_attribute("data-theme") == theme
    before = colours()
    page.click("#theme")
    assert page.locator("html").get_attribute("data-theme") == other
    after = colours()
    assert before[0] != after[0]
    assert before[1] != after[1], "the figures follow the page"


def test_another_step_can_be_chosen(browser: Any, report: Path) -> None:
    page = show(browser, report).page
    path = page.locator("#figure-path")
    before = path.inner_html()
    values = page.locator("#path-step option").evaluate_all("all => all.map(one => one.value)")
    assert len(values) > 1
    page.select_option("#path-step", values[1])
    assert path.inner_html() != before


def test_names_never_act(browser: Any, tmp_path: Path) -> None:
    analysis = ddltrace.open(SAMPLES[0]).analyze()
    opened = show(
        browser,
        write_report(
            SAMPLES[0],
            tmp_path / "report.html",
            trace=dataclasses.replace(analysis.trace, name=HOSTILE, notes=(HOSTILE,)),
            tensors=tuple(dataclasses.replace(row, name=HOSTILE) for row in analysis.tensors),
            collectives=tuple(
                dataclasses.replace(row, group=HOSTILE, op=HOSTILE) for row in analysis.collectives
            ),
            critical_path=tuple(
                dataclasses.replace(row, name=HOSTILE) for row in analysis.critical_path
            ),
        ),
    )
    assert HOSTILE in opened.page.inner_text("h1")
    assert opened.page.locator("img").count() == 0
    assert opened.page.evaluate("window.pwned === undefined")
    assert opened.troubles == []


@pytest.mark.long
def test_prints_white_and_comes_back(browser: Any, report: Path) -> None:
    page = show(browser, report, theme="dark").page
    paper = page.pdf(format="A4", print_background=True)
    assert paper.startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"
    widths = page.locator(".figure svg.main-svg").evaluate_all(
        "all => all.map(one => one.clientWidth)"
    )
    assert max(widths) <= 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"
