"""Measures the speed and memory of the analysis: ``python benchmarks/analysis.py``.

Creates synthetic traces with a known critical path, analyzes each in a separate process, and checks
every step's path against the known one before it prints a time. The goals, on 2 cores: 10 million
events of 2 ranks in 10 s; 1,024 ranks x 20 steps x 1,000 events in 60 s under 4 GB; the critical
path of such a step in under a second. With ``--growth``, it measures the growth of peak memory per
event, on traces with one, two and four times the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from synthetic import Shape, write_trace

CASES = {
    "long": (Shape(ranks=2, steps=5071), "10 million events of 2 ranks", 10.0, None),
    "wide": (Shape(ranks=1024, steps=20), "1,024 ranks, 20 steps, 1,000 events each", 60.0, 4.0),
}

GROWTH = (1, 2, 4)

# Run in a process of its own: the peak of memory is that of the analysis alone.
MEASURE = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[2])
from synthetic import Shape, expected_path
import ddltrace
from ddltrace.analyzer.analysis import analyze_in_full
shape = Shape(**json.loads(sys.argv[3]))
began, cpu = time.perf_counter(), time.process_time()
trace = ddltrace.open(sys.argv[1])
analyzed = analyze_in_full(trace)
analysis = analyzed.analysis
wall, cpu = time.perf_counter() - began, time.process_time() - cpu
assert [row.step for row in analysis.steps] == list(range(shape.steps))
for row in analysis.steps:
    assert round(row.wall_us * 1000) == shape.step, row
    assert analyzed.paths[row.step].totals_ns() == expected_path(shape), row
assert analysis.stragglers[0].rank == shape.straggler
assert analysis.stragglers[0].cause == "compute"
print(json.dumps({
    "wall": wall, "cpu": cpu, "events": analysis.trace.events,
    "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
}))
"""

# One step's path alone: messages joined, timelines not built yet.
ONE_PATH = """
import sys, time
import ddltrace
from ddltrace.analyzer.measures.measure import find_paths
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.measures.steps import find_steps
from ddltrace.analyzer.joined.trace_scans import scan_ranks
trace = ddltrace.open(sys.argv[1])
scans = scan_ranks(trace)
joined = join(trace, {rank: scan.messages for rank, scan in scans.items()})
steps = find_steps(scans, joined, range(10, 11))
began = time.perf_counter()
find_paths(trace, scans, joined, steps)
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="directory for the traces; kept and reused")
    parser.add_argument("--case", choices=list(CASES), action="append", help="only this case")
    parser.add_argument("--growth", action="store_true", help="measure how memory grows, too")
    parser.add_argument("--trial", action="store_true", help="small traces: whether it runs")
    chosen = parser.parse_args()
    if chosen.trial:
        for name, (shape, what, *goals) in CASES.items():
            CASES[name] = (replace(shape, ranks=2, steps=12), f"trial of: {what}", *goals)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        for name in chosen.case or CASES:
            _measure(folder / name, *CASES[name])
        if chosen.growth:
            _measure_growth(folder)


def _measure(
    path: Path, shape: Shape, what: str, goal_seconds: float, goal_gigabytes: float | None
) -> None:
    found = _analyze(path, shape, what)
    rate = found["events"] / found["wall"] / 1e6
    print(
        f"{what}: {found['wall']:.1f} s wall ({found['wall'] / goal_seconds:.2f} of the goal of "
        f"{goal_seconds:.0f} s), {found['cpu']:.1f} s of CPU on {os.cpu_count()} cores, "
        f"{rate:.2f} million events a second, {found['gigabytes']:.2f} GB at the peak"
        + (f" ({found['gigabytes'] / goal_gigabytes:.2f} of the goal)" if goal_gigabytes else "")
    )
    if goal_gigabytes:
        seconds = float(_python(ONE_PATH, str(path)))
        print(f"{what}: critical path of one step in {seconds:.2f} s (goal: 1 s)")


def _measure_growth(folder: Path) -> None:
    """The slope of the peak over the events, by least squares."""
    (shape, *_), events, peaks = CASES["long"], [], []
    for times in GROWTH:
        longer = replace(shape, steps=shape.steps * times)
        name = "long" if times == 1 else f"long-{times}"
        found = _analyze(folder / name, longer, f"{times} times the steps of 'long'")
        events.append(found["events"])
        peaks.append(found["gigabytes"] * (1 << 30))
        print(f"{events[-1]:,} events: {peaks[-1] / 1e9:.2f} GB at the peak", flush=True)
    slope, base = np.polyfit(events, peaks, 1)
    print(f"memory grows by {slope:.0f} bytes an event, from {base / 1e9:.2f} GB")


def _analyze(path: Path, shape: Shape, what: str) -> dict[str, float]:
    if not path.exists():
        print(f"making {what} ...", file=sys.stderr, flush=True)
        write_trace(path, shape)
    found: dict[str, float] = json.loads(
        _python(MEASURE, str(path), str(Path(__file__).parent), _json(shape))
    )
    return found


def _json(shape: Shape) -> str:
    return json.dumps(vars(shape))


def _python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
