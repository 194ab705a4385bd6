"""Finalizes a trace of one rank of at least GIGABYTES, in bounded memory of its own.

`large.py DIRECTORY GIGABYTES` writes it first, as a rank would, and prints how many rows it wrote
and how many came through.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np

from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.trace.event_reader import EventReader
from ddltrace.tracer.trace.finalize import finalize
from ddltrace.tracer.trace.run_files import write_run, write_sidecar
from ddltrace.tracer.trace.run_info import RankInfo, RunInfo
from ddltrace.tracer.trace.run_reader import read_run
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import STREAM_SUFFIX, segment_name

MORE_BYTES = 1 << 30
ROWS = 100_000


def write(directory, num_bytes):
    segment = segment_name(rank=0, attempt=0, pid=1)
    write_run(directory, RunInfo())
    write_sidecar(directory, RankInfo(rank=0, segment=segment, status="complete"))
    path = directory / (segment + STREAM_SUFFIX)
    stream, recorder, rng = StreamWriter(path), Recorder(ROWS), np.random.default_rng(0)
    builder = BatchBuilder(recorder.sites)
    sites = np.array([recorder.site("layer", f"layer{number}") for number in range(200)])
    now = rows = 0
    while path.stat().st_size < num_bytes:
        durations, gaps = rng.integers(1000, 60_000, ROWS), rng.integers(100, 1 << 20, ROWS)
        starts = now + np.cumsum(durations + gaps)
        chosen = sites[rng.integers(0, len(sites), ROWS)]
        table = np.stack([chosen, starts, starts + durations, np.full(ROWS, 1)], axis=1)
        recorder.flat.extend(table.ravel().tolist())
        now = int(starts[-1])
        batch = builder.build(recorder.take())
        stream.write(batch)
        rows += batch.num_rows
    stream.close()
    return segment, rows


def private_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def main():
    directory = Path(sys.argv[1])
    segment, rows = write(directory, float(sys.argv[2]) * 2**30)
    # Of private memory: a file that is mapped is no burden.
    most = private_bytes() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    run = finalize(directory, read_run(directory))
    read = sum(batch.num_rows for batch in EventReader(directory, segment))
    line = {"status": run.status, "notes": run.notes, "rows": rows, "read": read}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
