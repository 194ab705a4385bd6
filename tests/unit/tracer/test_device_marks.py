"""Marks that C++ records (timing/device_marks.py), on a stand-in for the CUDA runtime."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cuda_stand_in import StandIn

from ddltrace.tracer.native import build
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.timing.cuda_events import CudaRuntime, DeviceError
from ddltrace.tracer.timing.device_clock import DeviceClock, DeviceTimer, stream_lane
from ddltrace.tracer.timing.device_marks import DeviceMarks


class Bench:
    """A stand-in device with both timers."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.device = StandIn(folder)
        self.runtime: CudaRuntime = self.device.runtime(patch)
        self.recorder = Recorder(1 << 17)
        self._native = NativeLibrary(build.build())

    def clock(self) -> DeviceClock:
        return DeviceClock(
            self.runtime.new_event, self._record_at_once, lambda: self.device["now_ns"]
        )

    def _record_at_once(self, event: object) -> None:
        lag, self.device["lag_ns"] = self.device["lag_ns"], 0
        event.record(15)  # type: ignore[attr-defined]
        self.device["lag_ns"] = lag

    def marks(self) -> DeviceMarks:
        return DeviceMarks(self._native, self.runtime.functions(), self.recorder, self.clock(), 0)

    def timer(self) -> DeviceTimer:
        numbers: dict[int, int] = {}

        def current_stream() -> tuple[int, int]:
            stream = self.device["stream"]
            return stream, numbers.setdefault(stream, len(numbers))

        return DeviceTimer(
            self.recorder,
            self.clock(),
            self.runtime.new_event,
            current_stream,
            is_capturing=self.runtime.is_capturing,
        )

    def rows(self) -> list[tuple[int, ...]]:
        """What was recorded since the last call."""
        taken = self.recorder.take()
        cells = taken.flat.tolist()
        return [tuple(cells[at : at + 4]) for at in range(0, len(cells), 4)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    if build.compiler() is None:
        pytest.skip("there is no compiler")
    return Bench(tmp_path, monkeypatch)


def use_at_random(bench: Bench, timer: DeviceTimer | DeviceMarks, seed: int) -> tuple[Any, ...]:
    """Uses a timer in all ways, in a drawn order, and returns what came of it."""
    draw, device = random.Random(seed), bench.device
    device["now_ns"], device["records"] = 10**9, 0
    found: list[object] = []
    held: list[int] = []
    timer.resolve()
    for number in range(400):
        device["now_ns"] += draw.randrange(1_000_000)
        device["lag_ns"] = draw.choice((0, 5_000, 3_000_000))
        device["stream"] = draw.choice((0, 0, 0, 7, 8))
        device["capturing"] = draw.random() < 0.05
        what = draw.randrange(8)
        if what == 0 or (what < 4 and not held):
            mark = timer.mark()
            found.append(mark is None)
            if mark is not None:
                held.append(mark)
        elif what < 3:
            found.append(timer.interval(number, held.pop(draw.randrange(len(held)))))
        elif what == 3:
            start = held.pop(draw.randrange(len(held)))
            found.append(timer.interval(lambda *times: found.append(times), start))
        elif what == 4:
            draw.choice((timer.begin_gradients, timer.end_gradients))()
        elif what == 5:
            timer.end_gradient(1000 + number)
        elif what == 6 and held:
            found.append(timer.passed_ns(held.pop()))
        else:
            found.append(timer.resolve())
    timer.end_gradients()
    for mark in held:
        timer.forget(mark)
    device["now_ns"] += 10**7
    device["lag_ns"] = device["capturing"] = 0
    found.append(timer.resolve())
    return found, bench.rows(), device["records"], timer.num_pending


@pytest.mark.parametrize("seed", range(10))
def test_cpp_records_what_python_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    each = []
    for name in ("timer", "marks"):
        folder = tmp_path / name
        folder.mkdir()
        bench = Bench(folder, monkeypatch)
        each.append(use_at_random(bench, getattr(bench, name)(), seed))
    python, cpp = each
    assert len(python[1]) > 20
    assert cpp == python


def test_times_lie_between_the_marks(bench: Bench) -> None:
    marks, device = bench.marks(), bench.device
    device["stream"] = 9
    start = marks.mark()
    began = device["now_ns"]
    device["now_ns"] += 500_000
    device["lag_ns"] = 2_000_000  # the device is behind the host
    assert marks.interval(5, start)
    ended = device["now_ns"] + 2_000_000
    assert (marks.resolve(), marks.num_pending) == (0, 1)
    device["now_ns"] += 3_000_000
    assert (marks.resolve(), marks.num_pending) == (1, 0)
    [(site, start_ns, end_ns, lane)] = bench.rows()
    assert (site, lane) == (5, stream_lane(0))
    assert abs(start_ns - began) <= 2_000
    assert abs(end_ns - ended) <= 2_000


def test_events_are_used_again(bench: Bench) -> None:
    marks = bench.marks()
    marks.begin_gradients()
    for number in range(50):
        marks.end_gradient(number)
        marks.interval(100, marks.mark())
        marks.resolve()
    marks.end_gradients()
    rows = bench.rows()
    gradients = [row for row in rows if row[0] < 100]
    assert [row[0] for row in gradients] == list(range(50))
    assert [row[1] for row in gradients[1:]] == [row[2] for row in gradients[:-1]]
    assert len(rows) == 100
    assert marks.num_events == 4


def test_more_intervals_than_one_call_resolves(bench: Bench) -> None:
    marks = bench.marks()
    for number in range(3000):
        marks.interval(number, marks.mark())
    assert marks.resolve() == 3000
    assert [row[0] for row in bench.rows()] == list(range(3000))


def test_no_event_is_created_on_another_device(bench: Bench) -> None:
    marks = bench.marks()
    bench.device["device"] = 1
    assert marks.mark() is None
    assert bench.device["records"] == 0


def test_what_never_passes_is_counted_and_calls_are_told(bench: Bench) -> None:
    marks, told = bench.marks(), list[tuple[int, int]]()
    bench.device["lag_ns"] = 1 << 60
    marks.interval(1, marks.mark())
    marks.interval(lambda *times: told.append(times), marks.mark())
    assert marks.resolve() == 0
    marks.abandon(lost_at_ns=77)
    assert (bench.recorder.dropped, told) == (1, [(0, 77)])
    assert marks.num_pending == 0


def test_full_tables_drop_and_count(bench: Bench) -> None:
    marks = bench.marks()
    for _ in range((1 << 16) + 5):
        marks.interval(1, marks.mark())
    assert bench.recorder.dropped == 5


@pytest.mark.parametrize(
    "fails",
    [
        lambda marks: marks.mark(),
        lambda marks: marks.end_gradient(1),
    ],
    ids=["a mark", "a gradient"],
)
def test_a_device_that_fails_ends_the_timing(
    bench: Bench, fails: Callable[[DeviceMarks], object]
) -> None:
    marks = bench.marks()
    marks.begin_gradients()
    bench.device["stream"] = 13
    with contextlib.suppress(DeviceError):  # where the job's thread calls, it is told as well
        fails(marks)
    with pytest.raises(DeviceError, match="CUDA error 400"):
        marks.resolve()


def test_a_failed_query_raises(bench: Bench) -> None:
    marks = bench.marks()
    marks.resolve()
    marks.interval(1, marks.mark())
    bench.device["failure"] = 719
    with pytest.raises(DeviceError, match="CUDA error 719"):
        marks.resolve()


def test_nothing_is_recorded_after_the_stop(bench: Bench) -> None:
    marks = bench.marks()
    marks.stop()  # as a forked child does
    assert marks.mark() is None
    marks.begin_gradients()
    marks.end_gradient(1)
    assert bench.device["records"] == 0
