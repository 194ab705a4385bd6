"""Calls of the CUDA runtime, on a library that stands in for it; tests/gpu has the real one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddltrace.tracer.timing import cuda_events
from ddltrace.tracer.timing.cuda_events import CudaRuntime, DeviceError

# Time passes by one millisecond with each record; events of stream 7 are never complete.
RUNTIME = """
#include <stddef.h>
static int next, errors, recorded[64], stream_of[64];
int cudaEventCreateWithFlags(void** event, unsigned flags) {
    *event = (void*)(size_t)(++next);
    return flags;
}
int cudaEventRecord(void* event, void* stream) {
    static int now;
    recorded[(size_t)event] = ++now;
    stream_of[(size_t)event] = (int)(size_t)stream;
    return (size_t)stream == 13 ? 400 : 0;
}
int cudaEventQuery(void* event) {
    if (stream_of[(size_t)event] != 7) return 0;
    errors++;
    return 600;
}
int cudaEventElapsedTime(float* found, void* start, void* end) {
    *found = recorded[(size_t)end] - recorded[(size_t)start];
    return 0;
}
int cudaGetLastError(void) { int had = errors; errors = 0; return had ? 600 : 0; }
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart.so.99"
    source.write_text(RUNTIME)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    for name in ("getCurrentRawStream", "isCurrentStreamCapturing", "getDevice"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_: 0, raising=False)
    loaded = ctypes.PyDLL(str(library))
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: {"libcudart.so.99": loaded}[name])
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda="99.1", hip=None))
    return CudaRuntime()


def test_events_are_recorded_asked_and_compared(runtime: CudaRuntime) -> None:
    first, second = runtime.new_event(), runtime.new_event()
    first.record(0)
    second.record(5)
    assert first.query()
    assert second.query()
    assert first.elapsed_time(second) == 1.0
    first.record(0)
    assert first.elapsed_time(second) == -1.0


def test_an_event_that_is_not_complete_leaves_no_error_behind(runtime: CudaRuntime) -> None:
    event = runtime.new_event()
    event.record(7)
    assert not event.query()
    assert runtime._clear() == 0


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
