#!/usr/bin/env python3
"""Measures what marks on a device cost the job's thread, in Python and in C++, without a GPU.

A small library stands in for the CUDA runtime, so what is measured is the tracer's own code: on a
GPU each mark also costs one ``cudaEventRecord``. Both timers record the same marks in turns of one
process; the last column is the median of the ratios of the turns::

    python benchmarks/device_marks.py
    python benchmarks/device_marks.py --turns 3 --marks 500        a dry run
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.cuda_stand_in import StandIn

from ddltrace.tracer.native import build
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.timing.device_clock import DeviceClock, DeviceTimer
from ddltrace.tracer.timing.device_marks import DeviceMarks


class _Attributes:
    """Sets attributes as pytest's ``monkeypatch`` does, for the life of this process."""

    @staticmethod
    def setattr(target: Any, name: str, value: Any, *, raising: bool = True) -> None:
        del raising
        setattr(target, name, value)


def _timers(folder: Path) -> tuple[Recorder, dict[str, Any]]:
    device = StandIn(folder)
    runtime = device.runtime(_Attributes)
    # As fast as PyTorch's functions in C++ for these: device 0, its default stream, no capture.
    runtime.current_stream, runtime.current_device, runtime.is_capturing = abs, int, bool
    recorder = Recorder(1 << 20)

    def clock() -> DeviceClock:
        return DeviceClock(runtime.new_event, lambda event: event.record(0))

    numbers: dict[int, int] = {}

    def current_stream() -> tuple[int, int]:  # as `interpose/cuda.py` has it
        stream = runtime.current_stream(0)
        return stream, numbers.setdefault(stream, len(numbers))

    in_python = DeviceTimer(
        recorder,
        clock(),
        runtime.new_event,
        current_stream,
        is_capturing=runtime.is_capturing,
        is_current=lambda: runtime.current_device() == 0,
    )
    library = NativeLibrary(build.build())
    in_cpp = DeviceMarks(library, runtime.functions(), recorder, clock(), 0)
    return recorder, {"Python": in_python, "C++": in_cpp}


def _layers(timer: Any, count: int) -> None:
    for _ in range(count):
        timer.interval(1, timer.mark())


def _gradients(timer: Any, count: int) -> None:
    timer.begin_gradients()
    for _ in range(count):
        timer.end_gradient(1)
    timer.end_gradients()


WORK: dict[str, Callable[[Any, int], None]] = {
    "one layer: two marks": _layers,
    "one gradient: one mark": _gradients,
}


def _microseconds(do: Callable[[], object], count: int) -> float:
    begin = time.perf_counter_ns()
    do()
    return (time.perf_counter_ns() - begin) / 1000 / count


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--marks", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorder, timers = _timers(Path(folder))
        found: dict[str, dict[str, list[float]]] = {}
        for turn in range(options.turns + 1):
            for name, timer in timers.items():
                rows = {work: {name: 0.0} for work in WORK}
                for work, do in WORK.items():
                    cost = _microseconds(lambda do=do, t=timer: do(t, options.marks), options.marks)
                    rows[work][name] = cost
                    solved = _microseconds(timer.resolve, options.marks)
                    rows.setdefault("resolving one interval", {})[name] = solved
                    recorder.take()
                if turn:  # the first one creates the events
                    for work, costs in rows.items():
                        found.setdefault(work, {}).setdefault(name, []).append(costs[name])
    print(f"{'microseconds':26}{'Python':>10}{'C++':>10}{'C++ / Python':>15}")
    for work, costs in found.items():
        both = zip(costs["C++"], costs["Python"], strict=True)
        ratio = statistics.median(cpp / python for cpp, python in both)
        medians = (statistics.median(costs[name]) for name in timers)
        print(f"{work:26}{''.join(f'{m:10.2f}' for m in medians)}{ratio:15.2f}")


if __name__ == "__main__":
    main()
