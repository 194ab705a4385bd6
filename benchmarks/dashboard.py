"""How fast the dashboard's timeline is: reducing on the server, painting in the browser.

Run it from a checkout: ``python benchmarks/dashboard.py [--events 1000000 20000000]``. Times
are medians; each claim is a ratio of two of them, measured alternately in one run, since the
times alone say more about the machine than about the dashboard.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.trace import open_trace
from ddltrace.dashboard.app import create_app
from ddltrace.dashboard.frame import Window, encode_frame
from ddltrace.dashboard.lod import RowIndex
from ddltrace.dashboard.server import bind, running
from ddltrace.dashboard.tracks import Row
from ddltrace.dashboard.workspace import Workspace
from ddltrace.tracer.schema import EVENTS
from ddltrace.tracer.store import RankInfo, RunInfo, segment_name, write_events, write_run

ROWS = 32
PIXELS = 1400
RANKS = 4
SAMPLES = 15
CHROMIUM = Path("/usr/bin/chromium")
ZOOMS = (1.0, 0.1, 0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--browser-events", type=int, default=1_000_000)
    arguments = parser.parse_args()
    former: float | None = None
    for count in arguments.events:
        whole = measure_reduction(count)
        if former is not None:
            print(f"  the whole trace costs {whole / former:.2f} times what it did before")
        former = whole
    if CHROMIUM.exists():
        measure_browser(arguments.browser_events)
    else:
        print(f"{CHROMIUM} is missing: painting is not measured", file=sys.stderr)


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


def measure_browser(count: int) -> None:
    """Prints fetch and paint times of a real browser while it zooms and pans."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory:
        path = write_synthetic_trace(Path(directory) / "trace", count)
        workspace = Workspace([open_trace(path)])
        begin = time.perf_counter()
        events = workspace.get(0).timeline.num_events
        built = time.perf_counter() - begin
        print(f"{events:,} events of {RANKS} ranks in Chromium (timeline built in {built:.1f} s)")
        with serving(workspace) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            page.goto(url + "timeline")
            page.wait_for_selector("#timeline[data-sharp]")
            result = page.evaluate(_MEASURE)
            browser.close()
    for name, values in result.items():
        print(
            f"  {name}: median {statistics.median(values):.1f} ms, "
            f"95th percentile {np.percentile(values, 95):.1f} ms ({len(values)} samples)"
        )
    paint = statistics.median(result["paint"])
    print(f"  a paint takes {paint / (1000 / 60):.2f} of a frame at 60 Hz")


# Zooms in and out at many places, and pans; each view is painted at once from the frame at
# hand, then again from the sharp one.
_MEASURE = """async () => {
  const engine = document.getElementById("timeline").timeline;
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const painted = async () => { do { await pause(1); } while (engine.drawing); };
  const result = { paint: [], fetch: [] };
  for (let i = 0; i < 40; i++) {
    const width = engine.view.span * Math.pow(0.7, i % 20);
    const middle = engine.view.span * (0.1 + 0.8 * ((i * 0.618) % 1));
    engine.act(() => engine.view.set(middle - width / 2, middle + width / 2));
    await painted();
    result.paint.push(engine.lastPaint);
    const before = engine.source.current;
    for (let t = 0; t < 100 && engine.source.current === before; t++) await pause(5);
    if (engine.source.current !== before) result.fetch.push(engine.source.lastFetch);
    await painted();
    result.paint.push(engine.lastPaint);
  }
  return result;
}"""


@contextmanager
def serving(workspace: Workspace) -> Iterator[str]:
    """Serves a workspace on a free port."""
    with running(create_app(workspace).server, bind("127.0.0.1", None)) as url:
        yield url


def write_synthetic_trace(directory: Path, count: int) -> Path:
    """Writes a finished trace: per step nested layers, gradients and stacked messages."""
    layers = 40
    per_step = 4 + 3 * layers
    steps = max(1, count // (RANKS * per_step))
    directory.mkdir()
    run = RunInfo(status="complete", command=["synthetic"])
    for rank in range(RANKS):
        segment = segment_name(rank=rank, attempt=0, pid=1000 + rank)
        table = synthetic_events(rank, steps, layers)
        write_events(directory, segment, iter(table.to_batches(max_chunksize=1 << 16)))
        run.ranks.append(
            RankInfo(
                rank=rank,
                segment=segment,
                world_size=RANKS,
                clock_domain="one",
                status="complete",
                events=table.num_rows,
            )
        )
    write_run(directory, run)
    return directory


def synthetic_events(rank: int, steps: int, layers: int) -> pa.Table:
    """One rank's events, column by column."""
    rng = np.random.default_rng(rank)
    step_ns = 50_000_000
    origin = 1_000_000_000 + np.arange(steps, dtype=np.int64) * step_ns
    parts: list[dict[str, Any]] = []

    def add(start: Any, end: Any, kind: str, names: list[str], **fixed: Any) -> None:
        size = start.size
        name = pa.array(names * (size // len(names)), pa.string())
        parts.append(
            {"start_ns": start.ravel(), "end_ns": end.ravel(), "kind": kind, "name": name}
            | {"step": np.repeat(np.arange(steps), size // steps)}
            | fixed
        )

    for name, kind, begin, end in (
        ("step", "step", 0.0, 1.0),
        ("forward", "phase", 0.02, 0.3),
        ("backward", "phase", 0.31, 0.85),
        ("optimizer", "phase", 0.86, 0.98),
    ):
        add(origin + int(begin * step_ns), origin + int(end * step_ns), kind, [name], lane="main")
    width = int(0.27 * step_ns) // layers
    at = origin[:, None] + int(0.021 * step_ns) + np.arange(layers) * width
    names = [f"layers.{number}" for number in range(layers)]
    add(at, at + rng.integers(width // 2, width, at.shape), "layer", names, lane="main")
    ready = origin[:, None] + int(0.33 * step_ns) + np.arange(layers) * int(0.012 * step_ns)
    ready = ready + rng.integers(0, 100_000, ready.shape)
    add(ready, ready, "gradient", names, lane="main")
    end = ready + rng.integers(200_000, 1_500_000, ready.shape)
    seq = np.arange(steps * layers)
    message = {"op": "all_reduce", "group": "0", "seq": seq, "id": seq, "status": "ok"}
    add(ready, end, "message", names, lane="comm/0", **message)
    tables = []
    for part in parts:
        size = len(part["start_ns"])
        columns = []
        for wanted in EVENTS:
            value = part.get(wanted.name)
            if value is None:
                columns.append(pa.nulls(size, wanted.type))
            elif isinstance(value, str):
                columns.append(pa.array([value] * size).cast(wanted.type))
            else:
                columns.append(pa.array(value).cast(wanted.type))
        tables.append(pa.Table.from_arrays(columns, schema=EVENTS))
    table = pa.concat_tables(tables).unify_dictionaries()
    order = np.argsort(table["end_ns"].to_numpy(), kind="stable")
    return table.take(pa.array(order)).combine_chunks()


if __name__ == "__main__":
    main()
