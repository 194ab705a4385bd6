"""Measures how an analysis on Dask grows with the ranks: ``python benchmarks/scale.py``.

Creates traces of simulated ranks, analyzes each on a local Dask cluster in a process of its own,
and prints tables in Markdown: one worker against two on one trace; then time, memory and bytes of
the files that were opened, for every number of ranks. A straight line is fitted to all sizes but
the largest, checked on the largest, and extended to 100,000 ranks. The output is in
`docs/scale.md`. ``--records`` prints a table about ``run.json`` instead: its size, and the
processor time to write and to read it, if each rank lists the members of its groups, and if they
are stored once. ``--parts`` prints what the processor time of the client consists of.
``--ranges`` analyzes traces of more and more steps at once and in ranges of steps; ``--divided``
analyzes the traces of more and more ranks in ranges of one step each.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from unittest import mock

import numpy as np

SIZES = (64, 256, 1024, 4096)
TARGET = 100_000
LIMIT = "500MB"
RANKS_IN_RANGES = 64
STEPS_IN_RANGES = (1500, 3000, 6000)
RANGES_LIMIT = 512 << 20
ONE_STEP = 1
"""A memory limit in bytes that makes a range of every step."""

MEASURES = ("client_cpu_s", "worker_cpu_s", "client_mb", "opened_mb")

_opened = 0


@dataclass(frozen=True)
class Measured:
    """One analysis.

    Attributes:
        ranks: Ranks of the trace.
        events: Events of the trace.
        workers: Processes of the cluster; 0 for the embedded engine.
        wall_s: From opening the trace to the end of the analysis.
        client_cpu_s: Processor time of this process, with the scheduler.
        worker_cpu_s: Processor time of all workers, without their start.
        client_mb: Peak memory of this process.
        worker_mb: Peak memory of the largest worker.
        opened_mb: Sizes of the files of the trace, once for each time that a process opened one.
        stored_mb: Sizes of the files of the trace.
        digest: Digest of the analysis as JSON.
    """

    ranks: int
    events: int
    workers: int
    wall_s: float
    client_cpu_s: float
    worker_cpu_s: float
    client_mb: float
    worker_mb: float
    opened_mb: float
    stored_mb: float
    digest: str


COLUMNS = [field.name for field in fields(Measured)][3:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="sizes of the traces")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compare", type=int, default=256, help="ranks, for one worker and two")
    parser.add_argument("--repeat", type=int, default=3, help="runs of one worker and of two")
    parser.add_argument(
        "--checked", type=int, default=256, help="compare engines up to these ranks"
    )
    parser.add_argument("--keep", type=Path, help="directory for the traces; kept and reused")
    parser.add_argument("--records", action="store_true", help="measure only run.json")
    parser.add_argument("--parts", action="store_true", help="measure parts of the client's work")
    parser.add_argument("--divided", action="store_true", help="analyze in ranges of one step")
    parser.add_argument("--ranges", action="store_true", help="measure ranges of steps")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        path, workers, limit = chosen.one
        print(json.dumps(vars(measure(Path(path), int(workers), int(limit) or None))))
        return
    if chosen.records:
        print("| ranks | members | MB | write CPU s | read CPU s |\n|---|---|---|---|---|")
        for ranks in chosen.ranks:
            for once in (False, True):
                _print_record(ranks, once=once)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        if chosen.parts:
            _print_parts([_trace(folder, ranks, chosen.steps) for ranks in sorted(chosen.ranks)])
            return
        if chosen.ranges:
            _print_ranges(folder)
            return
        limit = ONE_STEP if chosen.divided else 0
        _compare_workers(_trace(folder, chosen.compare, chosen.steps), chosen.repeat, limit)
        found: list[Measured] = []
        _print_header()
        for ranks in sorted(chosen.ranks):
            path = _trace(folder, ranks, chosen.steps)
            found.append(_run(path, 2, limit))
            if ranks <= chosen.checked and _run(path, 0, limit).digest != found[-1].digest:
                raise SystemExit(f"{ranks} ranks: the engines differ")
            _print_row(found[-1])
        if len(found) > 2:
            _print_model(found)


def _compare_workers(path: Path, repeat: int, limit: int) -> None:
    """Prints the time of one worker and of two on the same trace, in turns."""
    runs: dict[int, list[Measured]] = {1: [], 2: []}
    for _ in range(repeat):
        for workers, found in runs.items():
            found.append(_run(path, workers, limit))
    print(f"\n{runs[1][0].ranks:,} ranks on {os.cpu_count()} cores, median of {repeat} runs:\n")
    print("| workers | wall s | client CPU s | workers CPU s |\n|---|---|---|---|")
    for workers, found in runs.items():
        row = [_median(found, name) for name in ("wall_s", "client_cpu_s", "worker_cpu_s")]
        print(f"| {workers} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.1f} |")
    ratios = [one.wall_s / two.wall_s for one, two in zip(runs[1], runs[2], strict=True)]
    print(f"\nOne worker takes {min(ratios):.2f} to {max(ratios):.2f} times as long as two.")


def _median(runs: list[Measured], name: str) -> float:
    return float(np.median([getattr(run, name) for run in runs]))


def _print_header() -> None:
    print(f"\nTwo workers, each with a limit of {LIMIT}:\n")
    print(f"| ranks | {' | '.join(name.replace('_', ' ') for name in COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|", flush=True)


def _print_row(one: Measured) -> None:
    values = " | ".join(f"{getattr(one, name):.1f}" for name in COLUMNS)
    print(f"| {one.ranks:,} | {values} |", flush=True)


def _print_model(found: list[Measured]) -> None:
    """Fits lines to all sizes but the largest, and prints what they predict."""
    *fitted, held = found
    ranks = np.array([each.ranks for each in fitted], dtype=float)
    print(
        f"\nLines fitted to {', '.join(f'{each.ranks:,}' for each in fitted)} ranks, with the "
        f"same weight for the relative error of each; checked on {held.ranks:,} ranks:\n"
    )
    print(
        f"| measure | at 0 ranks | per 1,000 ranks | predicted for {held.ranks:,} | measured | "
        f"measured / predicted | extended to {TARGET:,} |\n|---|---|---|---|---|---|---|"
    )
    for name in MEASURES:
        values = np.array([getattr(each, name) for each in fitted])
        slope, base = np.polyfit(ranks, values, 1, w=1 / np.maximum(values, 1e-9))
        predicted, measured = base + slope * held.ranks, getattr(held, name)
        print(
            f"| {name.replace('_', ' ')} | {base:.2f} | {slope * 1e3:.2f} | {predicted:.1f} | "
            f"{measured:.1f} | {measured / predicted:.2f} | {base + slope * TARGET:,.0f} |"
        )


def _print_record(ranks: int, *, once: bool) -> None:
    """Prints a row about ``run.json`` of a job with a group of all ranks and eight replicas."""
    from ddltrace.tracer.trace import run_info
    from ddltrace.tracer.trace.run_files import read_run_file, write_run

    whole = run_info.GroupInfo("0", "default_pg", "gloo", tuple(range(ranks)))
    replicas = [
        run_info.GroupInfo(str(1 + first), "replicas", "gloo", tuple(range(first, ranks, 8)))
        for first in range(8)
    ]
    infos = [
        run_info.RankInfo(rank, f"rank-{rank:05d}-0-1", ranks, groups=[whole, replicas[rank % 8]])
        for rank in range(ranks)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(run_info, "_MOST_MEMBERS", 0 if once else sys.maxsize),
    ):
        times = [time.process_time()]
        write_run(Path(folder), run_info.RunInfo(ranks=infos))
        times.append(time.process_time())
        read_run_file(Path(folder))
        times.append(time.process_time())
        size = os.stat(os.path.join(folder, "run.json")).st_size / 1e6
    how = "once" if once else "for each rank"
    written, read = np.diff(times)
    print(f"| {ranks:,} | {how} | {size:.1f} | {written:.2f} | {read:.2f} |")


PARTS = {
    "analysis.scan_ranks": "results of the ranks",
    "analysis.join": "joins of messages across ranks",
    "measures.rank_measures._measure": "measures of each rank",
    "measures.tensors.tensor_times": "tensors",
    "measures.measure.find_paths": "walk of the critical path",
    "measures.root_causes.find_causes": "root causes",
}
"""Functions of the analysis -> the part of the client's work that each stands for."""


def _print_parts(paths: list[Path]) -> None:
    """Prints the processor time of some parts of the client's work on each trace."""
    from ddltrace.analyzer.analysis import analyze_in_full
    from ddltrace.analyzer.engine.dask_engine import open_dask
    from ddltrace.analyzer.open_trace import open_trace

    names = list(PARTS.values())
    print(f"| ranks | events | client cpu s | {' | '.join(names)} |")
    print("|---" * (len(names) + 3) + "|", flush=True)
    for path in paths:
        with open_dask(workers=2, memory_limit=LIMIT) as engine, ExitStack() as stack:
            engine.on_each_worker(import_analysis, "")
            import_analysis("")
            spent: dict[str, float] = {}
            for name in PARTS:
                stack.enter_context(_timed(name, spent))
            began = time.process_time()
            trace = open_trace(path, engine)
            analysis = analyze_in_full(trace).analysis
            whole = time.process_time() - began
            parts = " | ".join(f"{spent[name]:.2f}" for name in PARTS)
            events = analysis.trace.events
            print(f"| {len(trace.ranks):,} | {events:,} | {whole:.2f} | {parts} |", flush=True)


def _timed(name: str, spent: dict[str, float]) -> AbstractContextManager[object]:
    """Adds up the processor time of the calling threads in a function of the analysis."""
    module, _, function_name = name.rpartition(".")
    place = importlib.import_module(f"ddltrace.analyzer.{module}")
    function = getattr(place, function_name)

    def timed(*arguments: object, **named: object) -> object:
        began = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            spent[name] = spent.get(name, 0.0) + time.thread_time() - began

    return mock.patch.object(place, function_name, timed)


def _print_ranges(folder: Path) -> None:
    """Prints what traces of more and more steps take, at once and in ranges of steps."""
    print(
        f"\n{RANKS_IN_RANGES} ranks; ranges with `--memory-limit {RANGES_LIMIT >> 20}MiB`; workers "
        f"with a limit of {LIMIT}:\n"
    )
    names = ("wall_s", "client_cpu_s", "worker_cpu_s", "client_mb", "worker_mb")
    shown = " | ".join(name.replace("_", " ") for name in names)
    print(f"| events | analyzed | workers | {shown} |")
    print("|---" * (len(names) + 3) + "|", flush=True)
    for steps in STEPS_IN_RANGES:
        path = _trace(folder, RANKS_IN_RANGES, steps)
        digests = set()
        for limit, workers in ((0, 0), (0, 2), *((RANGES_LIMIT, count) for count in (0, 1, 2))):
            one = _run(path, workers, limit)
            values = " | ".join(f"{getattr(one, name):.1f}" for name in names)
            how = "in ranges" if limit else "at once"
            print(f"| {one.events:,} | {how} | {workers or 'none'} | {values} |", flush=True)
            if limit:
                digests.add(one.digest)
        if len(digests) > 1:
            raise SystemExit(f"{steps} steps: the engines differ")


def _trace(folder: Path, ranks: int, steps: int) -> Path:
    from synthetic import Shape, write_trace

    path = folder / f"ranks-{ranks}-{steps}"
    if not path.exists():
        write_trace(path, Shape(ranks=ranks, steps=steps, layers=40, buckets=4))
    return path


def _run(path: Path, workers: int, limit: int = 0) -> Measured:
    command = [sys.executable, __file__, "--one", str(path), str(workers), str(limit)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(path: Path, workers: int, limit: int | None = None) -> Measured:
    """Analyzes a trace in this process, with the given memory limit of the analysis."""
    from ddltrace.analyzer.engine.dask_engine import open_dask
    from ddltrace.analyzer.open_trace import open_trace

    with ExitStack() as stack:
        engine = None
        if workers:
            engine = stack.enter_context(open_dask(workers=workers, memory_limit=LIMIT))
            engine.on_each_worker(count_opened, str(path))
            engine.on_each_worker(import_analysis, "")
        count_opened(str(path))
        before = sum(each[0] for each in _usages(engine))
        began, cpu = time.perf_counter(), time.process_time()
        trace = open_trace(path, engine)
        trace.memory_limit = limit
        analysis = trace.analyze()
        text = json.dumps(analysis.to_json())
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        usages = _usages(engine)
        stored = sum(file.stat().st_size for file in path.iterdir())
        return Measured(
            ranks=len(trace.ranks),
            events=analysis.trace.events,
            workers=workers,
            wall_s=wall,
            client_cpu_s=cpu,
            worker_cpu_s=sum(each[0] for each in usages) - before,
            client_mb=usage("")[1],
            worker_mb=max((each[1] for each in usages), default=0.0),
            opened_mb=(sum(each[2] for each in usages) + _opened) / 1e6,
            stored_mb=stored / 1e6,
            digest=hashlib.sha256(text.encode()).hexdigest(),
        )


def _usages(engine) -> list[tuple[float, float, int]]:  # noqa: ANN001
    return [] if engine is None else list(engine.on_each_worker(usage, "").values())


def usage(_: str) -> tuple[float, float, int]:
    """Processor seconds, peak memory in MB, and bytes of opened files of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, _opened


def import_analysis(_: str) -> None:
    """Imports the analysis, whose time does not depend on the trace."""
    import ddltrace.analyzer.analysis  # noqa: F401


def count_opened(folder: str) -> None:
    """From now on, adds up the sizes of the files in a folder that this process opens."""

    def seen(event: str, arguments: tuple[object, ...]) -> None:
        global _opened  # noqa: PLW0603
        if event == "open" and str(arguments[0]).startswith(folder):
            _opened += os.stat(str(arguments[0])).st_size

    sys.addaudithook(seen)


if __name__ == "__main__":
    # Workers import the functions of this file by the name of the module.
    from scale import main as run

    run()
