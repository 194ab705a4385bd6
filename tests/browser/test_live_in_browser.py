"""The live page in a real Chromium: a job is followed, then one of its ranks is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.jobs import environment, on_ranks, traced
from support.pages import new_page

import ddltrace
from ddltrace.analyzer.live.live_state import LiveRow, LiveState
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.server import bind, running
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.trace.run_reader import read_run

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120


def address_of(log: Path, process: subprocess.Popen[bytes]) -> str:
    """The address that the dashboard beside a job prints."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"Dashboard: (http://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found.group(1)


def until(page: Any, script: str, old: str = "") -> None:
    """Waits until a function of the page gives something true and other than before."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := page.evaluate(script)) or value == old:
        assert time.monotonic() < deadline, (script, page.inner_text("body"))
        page.wait_for_timeout(200)


@contextmanager
def followed(
    browser: Any, tmp_path: Path, job: list[str], *options: str
) -> Iterator[tuple[Any, str, subprocess.Popen[bytes]]]:
    """A job under `ddltrace run --dashboard`: a new page, the dashboard's address, the launcher.

    Its trace is ``trace`` in the folder. The page must not have had an error at the end.
    """
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            traced(tmp_path / "trace", job, *options, "--dashboard"),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
    troubles: list[str] = []
    try:
        address = address_of(log, process)
        page = new_page(browser, viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        yield page, address, process
        assert not troubles, troubles
        page.close()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.long
def test_a_job_is_followed_until_a_rank_is_killed(browser: Any, tmp_path: Path) -> None:
    with followed(browser, tmp_path, on_ranks("trains_on.py")) as (page, address, _):
        page.goto(address)
        page.wait_for_selector("main[data-page=live]")
        until(page, "() => /[1-9]\\d* steps so far on 2 ranks/.test(document.body.innerText)")
        page.wait_for_selector("#live-lanes .bars path")
        first = page.inner_text("#live-status h1")
        until(page, "() => document.querySelector('#live-status h1').innerText", first)
        # Other pages say that they show a part, and show more on request.
        page.goto(re.sub("/live.*", "/?trace=0", address))
        page.wait_for_selector("text=/still being written, [0-9]+ steps so far/")
        facts = page.inner_text("main[data-page=overview] .facts")
        page.click(".running button")
        until(page, "() => document.querySelector('main .facts').innerText", facts)
        page.goto(address)
        page.wait_for_selector("#live-ranks td")
        victim = next(info for info in read_run(tmp_path / "trace").ranks if info.rank == 1)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        page.wait_for_selector("[data-alert=dead][data-ranks='1']")
        assert "killed by SIGKILL" in page.inner_text("[data-alert=dead] >> nth=0")


def test_recording_is_switched_from_the_page(browser: Any, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    job = on_ranks("switched.py", "ddp", "until", str(enough))
    with followed(browser, tmp_path, job, "--off") as (page, address, process):
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "trains").exists():
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        page.goto(address)
        page.wait_for_selector("text=is not recorded now")
        page.fill("#switch-steps", "5")
        page.click("#switch-on")
        page.wait_for_selector("text=/Ranks 0-1 record steps [0-9]+ to [0-9]+/")
        said = page.inner_text("#switch-answer")
        first, last = map(int, re.findall(r"steps (\d+) to (\d+)", said)[0])
        until(page, "() => /: 5 steps recorded/.test(document.body.innerText)")
        page.fill("#switch-steps", "")
        page.click("#switch-on")
        page.wait_for_selector("text=/Ranks 0-1 record from step [0-9]+ on/")
        begin = int(re.findall(r"from step (\d+) on", page.inner_text("#switch-answer"))[0])
        until(page, "() => /steps so far on 2 ranks$/m.test(document.body.innerText)")
        page.click("#switch-off")
        page.wait_for_selector("text=/Ranks 0-1 do not record from step [0-9]+ on/")
        said = page.inner_text("#switch-answer")
        end = int(re.findall(r"from step (\d+) on", said)[0])
        count = 5 + end - begin
        until(page, f"() => /: {count} steps recorded/.test(document.body.innerText)")
        enough.touch()
        process.wait(60)
    of_ranks = [info.windows for info in read_run(tmp_path / "trace").ranks]
    assert of_ranks[0] == of_ranks[1]
    windows = [(window["first"], window["stop"]) for window in of_ranks[0]]
    assert windows == [(0, 0), (first, last + 1), (begin, end)]


class ManyRanks:
    """A job of 40 ranks in which another one is late whenever it is looked at."""

    directory = ROOT / "sample_traces" / "straggler"
    looks = 0

    def state(self) -> LiveState:
        self.looks += 1
        rows = tuple(
            LiveRow(rank, step=self.looks, lateness_us=float((7 * rank + self.looks) % 40))
            for rank in range(40)
        )
        return LiveState(world_size=40, num_steps=self.looks, rows=rows)


@pytest.mark.long
def test_many_ranks_are_a_grid_that_keeps_its_order_and_place(browser: Any) -> None:
    workspace = Workspace([ddltrace.open(ManyRanks.directory)])
    job = ManyRanks()
    workspace.live = lambda number: job  # type: ignore[method-assign, assignment, return-value]
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        page = new_page(browser, viewport={"width": 1280, "height": 900})
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(f"error {error}"))
        page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
        page.goto(f"{url}live?trace=0")
        page.locator("#live-ranks .ag-row").first.wait_for()
        page.locator("#live-ranks .ag-header-cell", has_text="late by").first.click()
        body = page.locator("#live-ranks .ag-body-viewport")
        body.evaluate("body => { body.scrollTop = 300; }")
        api = "window.dash_ag_grid.getApi('grid-live-ranks')"
        values = (
            f"() => {{ const found = []; {api}.forEachNodeAfterFilterAndSort("
            "({ data }) => found.push(data.v5)); return found; }"
        )
        step = f"() => {api}.getDisplayedRowAtIndex(0).data.v1"
        first = page.evaluate(step)
        until(page, f"() => ({step})() > {first} + 1")
        assert page.evaluate(values) == sorted(range(40), reverse=True)
        assert body.evaluate("body => body.scrollTop") == 300
        shown = page.locator("#live-ranks .ag-row [col-id=v1]").first.inner_text()
        assert int(shown) > first
        assert not troubles, troubles
