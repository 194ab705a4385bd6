"""What becomes of a large trace: ``python benchmarks/large_trace.py --gigabytes 10``.

A job that records as fast as it can, 20,000 calls of modules a step on two ranks, is recorded for
some minutes. Then what it recorded is laid end to end in streams, as a job of many hours leaves
them, until they have the size that was asked for. Prints what the job took, the memory of a rank in
the course of the recording, and the time, the peak of memory and of disk of finalizing the streams
and of analyzing the trace.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.run_files import write_run, write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.schema import EVENTS
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import STREAM_SUFFIX

_GROWING = ("step", "id", "seq")

JOB = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
blocks = [nn.Sequential(*(nn.Identity() for _ in range(100))) for _ in range(200)]
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, stop, steps, resident = torch.ones(2, 8), torch.zeros(1), 0, []
began = time.perf_counter()
while not stop:
    for _ in range(20):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        steps += 1
    stop.fill_(time.perf_counter() - began > float(sys.argv[1]))
    dist.broadcast(stop, 0)
    resident.append(int(open("/proc/self/statm").read().split()[1]) * 4096 // (1 << 20))
if dist.get_rank() == 0:
    print(steps, time.perf_counter() - began, *resident[:: max(1, len(resident) // 8)])
"""

MEASURE = """
import json, resource, sys, time
from pathlib import Path
began = time.perf_counter()
if sys.argv[1] == "finalize":
    from ddltrace.tracer.trace.finalize import finalize
    from ddltrace.tracer.trace.run_reader import read_run
    run = finalize(Path(sys.argv[2]), read_run(Path(sys.argv[2])))
    found = {"status": run.status, "events": sum(info.events for info in run.ranks)}
else:
    import ddltrace
    from ddltrace.analyzer.report.text_report import render_report
    analysis = ddltrace.open(sys.argv[2]).analyze()
    print(render_report(analysis), file=sys.stderr)
    found = {"steps": len(analysis.steps), "events": analysis.trace.events}
found["seconds"] = time.perf_counter() - began
found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10, help="of the streams together")
    parser.add_argument("--seconds", type=float, default=120, help="to record")
    parser.add_argument("--folder", type=Path, help="where there is room; by default temporary")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
        recorded, large = Path(temporary) / "recorded", Path(temporary) / "large"
        _record(recorded, chosen.seconds)
        repeat(recorded, large, int(chosen.gigabytes * 1e9))
        size = _size(large)
        found, peak = _measured("finalize", large)
        print(
            f"{size / 1e9:.2f} GB of streams, {found['events']:,} events: {found['status']} and "
            f"{_size(large) / 1e9:.2f} GB after {found['seconds']:.0f} s, {found['megabytes']} MB "
            f"of memory and {peak / size:.2f} times the streams on disk at the peak",
            flush=True,
        )
        found, _ = _measured("analyze", large)
        print(
            f"analyzed in {found['seconds']:.0f} s, {found['steps']:,} steps in full, "
            f"{found['megabytes']} MB of memory at the peak"
        )


def _record(path: Path, seconds: float) -> None:
    script = path.with_suffix(".py")
    script.write_text(JOB)
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        "--nproc-per-node=2",
    ]
    traced = [sys.executable, "-m", "ddltrace", "run", "-o", str(path), "--"]
    for how, prefix, limit in (("untraced", [], 10.0), ("traced", traced, seconds)):
        done = subprocess.run(
            [*prefix, *launch, str(script), str(limit)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        steps, took, *resident = done.stdout.split()
        print(
            f"{how}: {steps} steps of {1e3 * float(took) / int(steps):.0f} ms; MB of rank 0 in the "
            f"course of it: {' '.join(resident)}",
            flush=True,
        )
    infos = read_run(path).ranks
    events, dropped = sum(info.events or 0 for info in infos), sum(info.dropped for info in infos)
    print(f"recorded: {events:,} events, {dropped:,} dropped", flush=True)


def repeat(source: Path, target: Path, size: int) -> None:
    """Lays a trace end to end, as streams of ranks that were killed, until they have a size.

    Args:
        source: A finished trace, all of one clock.
        target: Where the streams go.
        size: Bytes of all streams together.
    """
    run = read_run(source)
    target.mkdir()
    write_run(target, RunInfo(command=run.command, level=run.level))
    spans = [_span(source, info) for info in run.ranks]
    period = {name: max(span[name] for span in spans) for name in spans[0]}
    for info in run.ranks:
        words = _dictionaries(source, info)
        path = target / (info.segment + STREAM_SUFFIX)
        writer = StreamWriter(path)
        times = 0
        while path.stat().st_size < size / len(run.ranks):
            for batch in EventReader(source, info.segment):
                writer.write(_moved(batch, times, period, words))
            times += 1
        writer.close()
        info.status, info.events = "running", None
        write_sidecar(target, info)


def _span(source: Path, info: RankInfo) -> dict[str, int]:
    """By how much each column grows from one copy of a rank's events to the next."""
    largest = dict.fromkeys(_GROWING, 0)
    first, last = [], []
    for batch in EventReader(source, info.segment, (*_GROWING, "start_ns", "end_ns")):
        for name in _GROWING:
            largest[name] = max(largest[name], pc.max(batch[name]).as_py() or 0)
        first.append(pc.min(batch["start_ns"]).as_py())
        last.append(pc.max(batch["end_ns"]).as_py())
    length = max(last) - min(first)
    grown = {name: value + 1 for name, value in largest.items()}
    grown["parent"] = grown["id"]
    return grown | dict.fromkeys(("start_ns", "end_ns", "enqueue_ns"), length)


def _dictionaries(source: Path, info: RankInfo) -> dict[str, pa.Array]:
    """All words of each column of a rank: those of its last batch."""
    for batch in EventReader(source, info.segment):
        last = batch
    coded = [field.name for field in EVENTS if pa.types.is_dictionary(field.type)]
    return {name: last[name].dictionary for name in coded}


def _moved(
    batch: pa.RecordBatch, times: int, period: dict[str, int], words: dict[str, pa.Array]
) -> pa.RecordBatch:
    """A batch as it would have been recorded a number of periods later."""
    columns = []
    for field, column in zip(EVENTS, batch.columns, strict=True):
        if field.name in period:
            by = pa.scalar(times * period[field.name], field.type)
            columns.append(pc.add(column, by))
        elif field.name in words:
            columns.append(pa.DictionaryArray.from_arrays(column.indices, words[field.name]))
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=EVENTS)


def _measured(what: str, path: Path) -> tuple[dict[str, int], int]:
    """Runs one of `MEASURE` in a process of its own; and the most that `path` took on disk."""
    command = [sys.executable, "-c", MEASURE, what, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _size(path))
            time.sleep(0.2)
        assert process.stdout is not None
        found: dict[str, int] = json.loads(process.stdout.read())
    return found, peak


def _size(path: Path) -> int:
    """Bytes of all files of a directory."""
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # replaced in the meantime
            total += file.stat().st_size
    return total


if __name__ == "__main__":
    main()
