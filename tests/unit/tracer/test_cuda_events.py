"""Calls of the CUDA runtime, on a library that stands in for it; tests/gpu has the real one."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cuda_stand_in import StandIn

from ddltrace.tracer.timing import cuda_events
from ddltrace.tracer.timing.cuda_events import CudaRuntime, DeviceError


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    try:
        return StandIn(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def runtime(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    return stand_in.runtime(monkeypatch)


def test_events_are_recorded_asked_and_compared(stand_in: StandIn, runtime: CudaRuntime) -> None:
    first, second = runtime.new_event(), runtime.new_event()
    first.record(0)
    stand_in["now_ns"] += 999_000
    second.record(5)
    assert first.query()
    assert second.query()
    assert first.elapsed_time(second) == 1.0
    assert second.elapsed_time(first) == -1.0


def test_an_event_that_is_not_complete_leaves_no_error_behind(
    stand_in: StandIn, runtime: CudaRuntime
) -> None:
    event = runtime.new_event()
    stand_in["lag_ns"] = 1
    event.record(7)
    assert not event.query()
    assert stand_in["errors"] == 0


def test_failed_calls_raise(runtime: CudaRuntime) -> None:
    with pytest.raises(DeviceError, match="CUDA error 400"):
        runtime.new_event().record(13)


def test_without_a_runtime_library_the_driver_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str) -> ctypes.PyDLL:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", load)
    version = SimpleNamespace(cuda="13.0", hip=None)
    with pytest.raises(OSError, match="libcuda"):
        cuda_events._load(version)
    with pytest.raises(OSError, match="libamdhip64"):
        cuda_events._load(SimpleNamespace(cuda=None, hip="7.1.25424"))
    assert asked == ["libcudart.so.13", "libcuda.so.1", "libamdhip64.so.7"]
