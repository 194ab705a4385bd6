"""Compares the import and breakdown of Kineto files with Holistic Trace Analysis.

Both read the same files and compute the same figures, each run in a process of its own (and in
those that it starts), one after the other in turns so that a busy machine slows both. Run with:

    python benchmarks/kineto_import.py RANK.json.gz... --hta-python VENV/bin/python

where VENV has HolisticTraceAnalysis 0.5.0. Each file given (one step of one rank of a real GPU
job) is repeated, shifted in time and with identifiers of its own, until it has the events asked
for: a real mix of events at the size of a longer recording. Processor time is that of all
processes together; so is memory: the highest sum of their proportional set sizes seen.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

_OURS: Final = """
import json, os, sys, time
import ddltrace
from ddltrace.analyzer.measures.hta_definitions import hta_ranks
from ddltrace.analyzer import open_trace
from ddltrace.analyzer.importers import formats
begin, before = time.perf_counter(), sum(os.times()[:4])
opened = ddltrace.open(sys.argv[1])
found = [each.breakdown for each in hta_ranks(opened)]
seconds, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - before
figures = [[b.rank, round(b.overlap_percent, 2), b.idle_us, b.compute_us, b.kernel_time_us]
           for b in found if b is not None]
from pathlib import Path
from ddltrace.analyzer.importers.chrome.trace_events import EventFile
before = time.process_time()
for file in Path(sys.argv[1]).iterdir():
    for chunk in EventFile(file, 0):
        pass
floor = time.process_time() - before
"""
_HTA: Final = """
import json, logging, os, sys, time
from hta.trace_analysis import TraceAnalysis
logging.disable(logging.CRITICAL)
begin, before = time.perf_counter(), sum(os.times()[:4])
folder = sys.argv[1]
files = {int(name.split(".")[0][5:]): f"{folder}/{name}" for name in os.listdir(folder)}
analysis = TraceAnalysis(trace_files=files, trace_dir="/")
overlap = analysis.get_comm_comp_overlap(visualize=False)
breakdown = analysis.get_temporal_breakdown(visualize=False)
seconds, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - before
figures = [[int(o["rank"]), o["comp_comm_overlap_pctg"], b["idle_time(us)"],
            b["compute_time(us)"], b["kernel_time(us)"]]
           for (_, o), (_, b) in zip(overlap.iterrows(), breakdown.iterrows())]
"""
_REPORT: Final = """
floor = globals().get("floor")
print(json.dumps({"seconds": seconds, "cpu": cpu, "floor": floor, "figures": sorted(figures)}))
"""
_IDENTIFIERS: Final = ("External id", "correlation", "Ev Idx")
_STRIDE: Final = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("files", type=Path, nargs="+", help="Kineto files, one for each rank")
    parser.add_argument("--hta-python", type=Path, help="a Python that has HTA installed")
    parser.add_argument("--events", type=int, default=216_000, help="of each rank")
    parser.add_argument("--plain", action="store_true", help="write the files uncompressed")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        events = size = 0
        for rank, source in enumerate(options.files):
            target = folder / (f"rank-{rank}.json" if options.plain else f"rank-{rank}.json.gz")
            found, text = repeat(source, target, options.events)
            events, size = events + found, size + text
        print(f"{len(options.files)} files, {events} events, {size / 1e6:.0f} MB of JSON")
        programs = {"ddltrace": (Path(sys.executable), _OURS)}
        if options.hta_python is not None:
            programs["HTA"] = (options.hta_python, _HTA)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
        for _ in range(options.runs):
            for name, (python, program) in programs.items():
                runs[name].append(run(python, program, folder))
    for name, results in runs.items():
        seconds = [result["seconds"] for result in results]
        memory = max(result["megabytes"] for result in results)
        print(
            f"{name:9} median {statistics.median(seconds):.3f} s, best {min(seconds):.3f} s, "
            f"{memory:.0f} MB, {events / statistics.median(seconds):,.0f} events/s"
        )
    cpu, floor = (
        statistics.median(run[key] for run in runs["ddltrace"]) for key in ("cpu", "floor")
    )
    print(
        f"ddltrace takes {cpu:.2f} s of processor time; to decompress the files and to decode "
        f"their JSON, and no more, takes {floor:.2f} s"
    )
    if "HTA" in runs:
        compare(runs["ddltrace"], runs["HTA"])


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for key, name in (("seconds", "wall time"), ("cpu", "processor time")):
        ratios = [b[key] / a[key] for a, b in zip(ours, theirs, strict=True)]
        each = " ".join(f"{ratio:.1f}" for ratio in ratios)
        print(f"ratio in {name}: median {statistics.median(ratios):.1f}, runs {each}")
    memory = max(a["megabytes"] for a in ours) / max(b["megabytes"] for b in theirs)
    print(f"{memory:.2f} of the memory")
    print(f"our figures: {ours[0]['figures']}")
    print(f"HTA's:       {theirs[0]['figures']}")


def run(python: Path, program: str, folder: Path) -> dict[str, Any]:
    with subprocess.Popen(
        [str(python), "-c", program + _REPORT, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        peak, done = [0.0], threading.Event()
        watcher = threading.Thread(target=watch_memory, args=(process.pid, peak, done))
        watcher.start()
        output, _ = process.communicate()
        done.set()
        watcher.join()
    if process.returncode:
        sys.exit(f"{python} ended with {process.returncode}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result | {"megabytes": peak[0]}


def watch_memory(pid: int, peak: list[float], done: threading.Event) -> None:
    """Until it is done, notes the most memory that a process and its children hold together."""
    # Looking takes time itself: seldom enough not to slow what is measured.
    while not done.wait(0.05):
        held = 0
        with suppress(psutil.Error):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.Error):
                    held += process.memory_full_info().pss
        peak[0] = max(peak[0], held / 2**20)


def repeat(source: Path, target: Path, wanted: int) -> tuple[int, int]:
    """Writes a file with the source's events over and over, in Kineto's own layout.

    Returns:
        The number of events and the bytes of JSON.
    """
    with gzip.open(source) as file:
        value = json.load(file)
    moving = [event for event in value["traceEvents"] if _moves(event)]
    fixed = [event for event in value["traceEvents"] if not _moves(event)]
    first = min(event["ts"] for event in moving)
    period = max(event["ts"] + event.get("dur", 0) for event in moving) - first + 100
    head = {key: entry for key, entry in value.items() if key not in ("traceEvents", "traceName")}
    times = max(1, round(wanted / len(moving)))
    size = 0
    with gzip.open(target, "wt", 6) if target.suffix == ".gz" else target.open("w") as out:
        size += out.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for number in range(times):
            for event in moving:
                size += out.write(_text(_shifted(event, number, period)) + ",\n")
        size += out.write(",\n".join(_text(event) for event in fixed))
        size += out.write('\n  ],\n  "traceName": "repeated"\n}\n')
    return times * len(moving) + len(fixed), size


def _moves(event: dict[str, Any]) -> bool:
    return event["ph"] in "Xsf" and event.get("cat") != "Trace"


def _shifted(event: dict[str, Any], number: int, period: float) -> dict[str, Any]:
    moved = dict(event)
    moved["ts"] += number * period
    if "id" in moved:
        moved["id"] += number * _STRIDE
    if "args" in moved:
        moved["args"] = {
            key: entry + number * _STRIDE if key in _IDENTIFIERS else entry
            for key, entry in moved["args"].items()
        }
    if moved["name"].startswith("ProfilerStep#"):
        step = int(moved["name"].partition("#")[2])
        moved["name"] = f"ProfilerStep#{step + number}"
    return moved


def _text(event: dict[str, Any]) -> str:
    args = event.get("args")
    plain = {key: entry for key, entry in event.items() if key != "args"}
    text = "  {\n    " + json.dumps(plain)[1:-1]
    if args is not None:
        text += ',\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }"
    return text + "\n  }"


if __name__ == "__main__":
    main()
