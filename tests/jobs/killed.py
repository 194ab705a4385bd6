"""Kills ranks at random moments: `killed.py DIRECTORY COUNT SEED`; one JSON line for each.

Each child trains and writes the time at which each optimizer step ended into shared memory;
the parent kills it and prints how many of them were over when the last events were taken that the
writer had written, and for how many milliseconds the child had trained on since: of that thread's
time on a processor, which neither others on the machine nor the child's other threads stretch.
"""

import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor.parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltrace.tracer.capture.inject import arm
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.record.writer import WriterThread
from ddltrace.tracer.trace.run_files import write_run
from ddltrace.tracer.trace.run_info import RunInfo

MAX_STEPS = 1 << 17
# Shared memory: how many steps, when the last written events were taken, how long the training
# thread had worked by then and by the end of the last step; from there on, the end of each step.
HEAD = 32
SHARED_BYTES = HEAD + 8 * MAX_STEPS


def note_writes(shared):
    """Notes, after each write, when the events that it took were taken."""
    take, write = Recorder.take, WriterThread._write
    clock = time.pthread_getcpuclockid(threading.get_ident())
    began = [0, 0]

    def noted_take(recorder):
        began[:] = time.monotonic_ns(), time.clock_gettime_ns(clock)
        return take(recorder)

    def noted_write(writer, taken, *, last):
        write(writer, taken, last=last)
        struct.pack_into("<qq", shared, 8, *began)

    Recorder.take, WriterThread._write = noted_take, noted_write


def note_step(shared, step):
    """Notes that a step has ended."""
    struct.pack_into("<q", shared, HEAD + 8 * step, time.monotonic_ns())
    struct.pack_into("<q", shared, 24, time.thread_time_ns())
    struct.pack_into("<q", shared, 0, step + 1)


def train(shared):
    note_writes(shared)
    file = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(MAX_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        note_step(shared, step)


def facts_of_death(shared):
    """How many steps had ended, how many of them are sure to be in the trace, what may be lost."""
    steps, taken, worked_then, worked = struct.unpack_from("<4q", shared, 0)
    ends = struct.unpack_from(f"<{steps}q", shared, HEAD)
    sure = sum(end < taken for end in ends)
    lost_ms = max(worked - worked_then, 0) / 1e6 if taken else None
    return {"steps": steps, "sure": sure, "lost_ms": lost_ms}


def main():
    base, count, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    for number in range(count):
        trace = base / str(number)
        trace.mkdir(parents=True)
        write_run(trace, RunInfo())
        shared = mmap.mmap(-1, SHARED_BYTES)
        child = os.fork()
        if child == 0:
            # What is measured of the cost would leave out some steps.
            arm(CaptureConfig(directory=trace))
            train(shared)
            os._exit(0)
        # From the first step on: before it, there may be nothing to lose.
        while struct.unpack_from("<q", shared, 0)[0] == 0:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(json.dumps({"number": number, **facts_of_death(shared)}), flush=True)


if __name__ == "__main__":
    main()
