"""Measures the dashboard: reducing intervals on the server, drawing in the browser.

Run it from a checkout: ``python benchmarks/dashboard.py [--events 1000000 20000000]``. What
reducing costs is a ratio of two medians, measured alternately in one run. The rest is the
command itself with a large trace, in a real browser.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from synthetic import Shape, write_trace

from ddltrace.dashboard.timeline.frame import Window, encode_frame
from ddltrace.dashboard.timeline.lod import RowIndex
from ddltrace.dashboard.timeline.tracks import Row

ROWS = 32
PIXELS = 1400
RANKS = 4
SAMPLES = 15
CHROMIUM = Path("/usr/bin/chromium")
VISITS_BEFORE = 3
ZOOMS = (1.0, 0.1, 0.001)
SMALL = Path(__file__).resolve().parents[1] / "sample_traces" / "straggler"
FIRST_PICTURE = "#timeline[data-sharp]"
EVERY_EVENT = "#timeline[data-whole=yes][data-sharp]"
FINDINGS = ".headline h1"
FIGURE = ".graph .js-plotly-plot .main-svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--browser-events", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="starts with stored files")
    arguments = parser.parse_args()
    former: float | None = None
    for count in arguments.events:
        whole = measure_reduction(count)
        if former is not None:
            print(f"  the whole trace costs {whole / former:.2f} times what it did before")
        former = whole
    if CHROMIUM.exists():
        measure_dashboard(arguments.browser_events, arguments.repeats)
    else:
        print(f"{CHROMIUM} is missing: the command is not measured", file=sys.stderr)


def measure_reduction(count: int) -> float:
    """Prints what a frame costs on the server; returns the time for the whole trace."""
    rng = np.random.default_rng(0)
    rows = []
    begin = time.perf_counter()
    for _ in range(ROWS):
        size = count // ROWS
        times = np.cumsum(rng.integers(100, 20_000, 2 * size), dtype=np.int64)
        kinds = rng.integers(0, 16, size).astype(np.uint8)
        row = RowIndex(times[0::2].copy(), times[1::2].copy())
        names = rng.integers(0, 500, size).astype(np.int32)
        rows.append(Row(row, np.arange(size, dtype=np.int32), names, kinds))
    built = time.perf_counter() - begin
    span = int(max(row.index.start[-1] for row in rows))
    print(f"{count:,} events in {ROWS} rows, {PIXELS} pixels (made and indexed in {built:.1f} s)")
    whole = 0.0
    for zoom in ZOOMS:
        width = int(span * zoom)
        window = Window((span - width) // 2, (span + width) // 2, PIXELS)
        ours, naive, frame = alternately(
            lambda window=window: [row.index.reduce(window.edges()) for row in rows],
            lambda window=window: [scan(row, window) for row in rows],
            lambda window=window: encode_frame(window, [list(enumerate(rows))]),
        )
        whole = whole or ours
        print(
            f"  {zoom:7.1%} of it: reduced in {ours * 1e3:6.1f} ms; looking at every event takes "
            f"{naive / ours:5.2f} times as long; a frame, encoded, {frame * 1e3:6.1f} ms"
        )
    return whole


def scan(row: Row, window: Window) -> Any:
    """The longest interval per pixel without tables: every event of the window is looked at."""
    first = np.searchsorted(row.index.start, window.edges())
    low, high = int(first[0]), int(first[-1])
    duration = np.diff(row.index.covered[low : high + 1])
    counts = np.diff(first)
    counts = counts[counts > 0]
    if not len(counts):
        return counts
    offset = np.cumsum(counts) - counts
    longest = np.repeat(np.maximum.reduceat(duration, offset), counts)
    hits = np.flatnonzero(duration == longest)
    return low + hits[np.searchsorted(hits, offset)]


def alternately(*functions: Callable[[], Any]) -> list[float]:
    """Median seconds of processor time of each function, measured in turns."""
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(SAMPLES):
        for function, own in zip(functions, samples, strict=True):
            begin = time.process_time()
            function()
            own.append(time.process_time() - begin)
    return [statistics.median(own) for own in samples]


def measure_dashboard(count: int, repeats: int) -> None:
    """Prints what the command costs with a large trace: without its stored files, and with them."""
    steps = max(1, count // (RANKS * Shape().events))
    with tempfile.TemporaryDirectory() as directory:
        path = write_trace(Path(directory) / "trace", Shape(ranks=RANKS, steps=steps))
        load = os.getloadavg()[0]
        print(
            f"ddltrace dashboard, {RANKS * steps * Shape().events:,} events, {RANKS} ranks, "
            f"{os.cpu_count()} cores, load {load:.1f}"
        )
        measure_timeline(path, "timeline opened first")
        remove_stored(path)
        measure_overview(path, "overview opened first")
        measure_timeline_start(path, "timeline opened again, by a new browser")
        measure_overview(path, "overview opened again, by a new browser")
        # Then by a browser that is running and has kept the scripts, as that of a user has.
        with chromium() as browser:
            for _ in range(min(VISITS_BEFORE, repeats)):
                visit(browser, path)
            measure_timeline(path, "timeline opened again", browser)
            measure_overview(path, "overview opened again", browser)
            for _ in range(repeats):
                measure_timeline_start(path, "timeline opened once more", browser)
                measure_overview(path, "overview opened once more", browser)
            stored = sum(file.stat().st_size for file in path.glob(".ddltrace-cache/*"))
            print(f"  stored beside the trace: {stored / 1e9:.2f} GB")
            remove_stored(path)
            measure_timeline_start(path, "timeline opened without stored files", browser)
            # What of these times the number of events does not cause.
            measure_timeline_start(SMALL, "timeline of a small trace", browser)
            measure_overview(SMALL, "overview of a small trace", browser)


def remove_stored(path: Path) -> None:
    """Removes the stored timeline and analysis of a trace."""
    for file in path.glob(".ddltrace-cache/*"):
        file.unlink()


@contextmanager
def chromium() -> Iterator[Any]:
    """A new browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        # Other browsers of Playwright keep no compiled scripts.
        browser = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=str(CHROMIUM),
            args=["--no-sandbox", "--disable-gpu"],
            viewport={"width": 1600, "height": 1000},
        )
        yield browser
        browser.close()


def visit(browser: Any, path: Path) -> None:
    """Opens both pages, each with a new server, and leaves the browser time to keep its scripts."""
    for address, shown in (("timeline", FIRST_PICTURE), ("", FIGURE)):
        with dashboard_of(path) as (_, _, url):
            page = browser.new_page()
            page.goto(url + address)
            page.wait_for_selector(shown)
            page.wait_for_timeout(2000)
            page.close()


@contextmanager
def visiting(
    path: Path, when: str, browser: Any = None
) -> Iterator[tuple[Any, str, Callable[..., None]]]:
    """A page of a dashboard that was just started, its address, and a function that reports.

    The function takes what to call a moment, and a selector: it waits for the first element that
    matches it. The page itself takes the time, at each frame that it draws: a program that waits
    for an element from outside learns of it up to a second later.
    If no browser is given, a new one is started.
    """
    with ExitStack() as started:
        page = (browser or started.enter_context(chromium())).new_page()
        page.set_default_timeout(600_000)
        selectors = json.dumps([FIRST_PICTURE, EVERY_EVENT, FINDINGS, FIGURE])
        page.add_init_script(_WATCH.replace("SELECTORS", selectors))
        with dashboard_of(path) as (server, began, url), summed_memory(server.pid) as whole:
            print(f"  {when}:")

            def reached(what: str, selector: str | None = None) -> None:
                at = time.time()
                if selector is not None:
                    seen = page.wait_for_function("(one) => window.firstSeen[one]", arg=selector)
                    at = seen.json_value() / 1e3
                now, peak = memory(server.pid)
                print(
                    f"    {what} after {at - began:.1f} s ({cpu_seconds(server.pid):.1f} s of "
                    f"CPU), {now:.2f} GB (peak {peak:.2f}), with all its processes at most "
                    f"{max(whole, default=0.0):.2f} GB",
                    flush=True,
                )

            reached("address printed")
            yield page, url, reached
        page.close()


def measure_timeline(path: Path, when: str, browser: Any = None) -> None:
    """Prints what the timeline costs, from the start of the command to a search."""
    with visiting(path, when, browser) as (page, url, reached):
        page.goto(url + "timeline", wait_until="commit")
        reached("first picture", FIRST_PICTURE)
        reached("every event drawn", EVERY_EVENT)
        print_times("zooming", page.evaluate(_MEASURE))
        reached("zoomed")
        searched = page.evaluate(_SEARCH, "block3.")
        click = time.perf_counter()
        page.evaluate(_CLICK)
        page.wait_for_selector(".details .part")
        clicked = time.perf_counter() - click
        print(f"    a search took {searched / 1e3:.2f} s, the details of a message {clicked:.2f} s")
        reached("all done")


def measure_timeline_start(path: Path, when: str, browser: Any = None) -> None:
    """Prints what the first picture of the timeline costs, from the start of the command on."""
    with visiting(path, when, browser) as (page, url, reached):
        page.goto(url + "timeline", wait_until="commit")
        reached("first picture", FIRST_PICTURE)


def measure_overview(path: Path, when: str, browser: Any = None) -> None:
    """Prints what the overview costs, from the start of the command on."""
    with visiting(path, when, browser) as (page, url, reached):
        page.goto(url, wait_until="commit")
        reached("findings shown", FINDINGS)
        reached("first figure drawn", FIGURE)


def print_times(what: str, times: dict[str, list[float]]) -> None:
    """Prints a line for each of some samples in milliseconds."""
    for name, values in times.items():
        print(
            f"    {what}: {name} median {statistics.median(values):.1f} ms, "
            f"95th percentile {np.percentile(values, 95):.1f} ms, worst {max(values):.1f} ms "
            f"({len(values)} samples)"
        )


@contextmanager
def dashboard_of(path: Path) -> Iterator[tuple[subprocess.Popen[str], float, str]]:
    """The command in a process of its own: the process, when it began, its address."""
    # Python's default: compiled modules are kept. Some environments switch that off.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.time()  # The page reads the same clock.
    process = subprocess.Popen(
        [sys.executable, "-m", "ddltrace", "dashboard", str(path), "--no-browser", "--no-token"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        yield process, began, process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> tuple[float, float]:
    """What a process holds in memory, and the most that it held, in GB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kilobytes = (int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    now, peak = (value / (1 << 20) for value in kilobytes)
    return now, peak


@contextmanager
def summed_memory(pid: int) -> Iterator[list[float]]:
    """The memory of a process and those below it, in GB, read ten times a second.

    A page that several processes have mapped counts in equal parts for each (PSS).
    """
    sums: list[float] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.1):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found = [process, *process.children(recursive=True)]
                sums.append(sum(map(shared_fairly, found)) / (1 << 30))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield sums
    finally:
        ended.set()
        reader.join()


def shared_fairly(process: psutil.Process) -> int:
    """The proportional set size of a process, in bytes; 0 if it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


# When an element of each kind was first visible, in milliseconds since 1970.
_WATCH = """(() => {
  const waiting = new Set(SELECTORS), seen = (window.firstSeen = {});
  const look = () => {
    for (const selector of waiting) {
      const element = document.querySelector(selector);
      if (element === null || element.getClientRects().length === 0) continue;
      seen[selector] = Date.now();
      waiting.delete(selector);
    }
    if (waiting.size > 0) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})()"""

# Zooms in and out at many places, and pans; each view is painted at once from the frame at
# hand, then again from the sharp one.
_MEASURE = """async () => {
  const engine = document.getElementById("timeline").timeline;
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const painted = async () => { do { await pause(1); } while (engine.drawing); };
  const result = { paint: [], fetch: [], "fetch and paint": [] };
  for (let i = 0; i < 40; i++) {
    const width = engine.view.span * Math.pow(0.7, i % 20);
    const middle = engine.view.span * (0.1 + 0.8 * ((i * 0.618) % 1));
    engine.act(() => engine.view.set(middle - width / 2, middle + width / 2));
    await painted();
    result.paint.push(engine.lastPaint);
    const before = engine.source.current;
    for (let t = 0; t < 100 && engine.source.current === before; t++) await pause(5);
    const fetched = engine.source.current !== before && engine.source.lastFetch;
    await painted();
    result.paint.push(engine.lastPaint);
    if (fetched === false) continue;
    result.fetch.push(fetched);
    result["fetch and paint"].push(fetched + engine.lastPaint);
  }
  return result;
}"""


_CLICK = """() => {
  const engine = document.getElementById("timeline").timeline;
  const { source, layout } = engine, role = layout.roles.indexOf("collective");
  engine.select(engine.item(source.current, source.current.role.indexOf(role), 0));
}"""

_SEARCH = """async (query) => {
  const { source } = document.getElementById("timeline").timeline;
  const begin = performance.now();
  await source.search(query);
  return performance.now() - begin;
}"""


if __name__ == "__main__":
    main()
