"""A library that stands in for the CUDA runtime: events on a device that the test moves on."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ddltrace.tracer.timing import cuda_events

# Each record takes a microsecond; the device passes it `stand_in_lag_ns` later, and in order.
SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
int64_t stand_in_now_ns = 1000000000, stand_in_lag_ns, stand_in_records, stand_in_errors;
int64_t stand_in_stream, stand_in_capturing, stand_in_device, stand_in_failure;
int cudaEventCreateWithFlags(void** event, unsigned flags) {
    *event = calloc(1, sizeof(int64_t));
    return (int)flags;
}
int cudaEventRecord(void* event, void* stream) {
    stand_in_now_ns += 1000;
    stand_in_records++;
    static int64_t passed[16];
    int64_t at = stand_in_now_ns + stand_in_lag_ns, former = passed[(size_t)stream % 16];
    passed[(size_t)stream % 16] = *(int64_t*)event = at > former ? at : former;
    return stream == (void*)13 ? 400 : 0;
}
int cudaEventQuery(void* event) {
    if (stand_in_failure) return (int)stand_in_failure;
    if (*(int64_t*)event <= stand_in_now_ns) return 0;
    stand_in_errors++;
    return 600;
}
int cudaEventElapsedTime(float* found, void* start, void* end) {
    *found = (*(int64_t*)end - *(int64_t*)start) / 1e6;
    return 0;
}
int cudaGetLastError(void) { int had = stand_in_errors > 0; stand_in_errors = 0; return 600 * had; }
int cudaStreamIsCapturing(void* stream, int* status) {
    *status = (int)stand_in_capturing;
    return 0;
}
int cudaGetDevice(int* device) { *device = (int)stand_in_device; return 0; }
int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
    *stream = (void*)stand_in_stream;
    return 0;
}
"""


class StandIn:
    """The compiled library, in place of the runtime and of PyTorch's library of the device.

    Args:
        folder: Where it is compiled.

    Raises:
        FileNotFoundError: There is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            raise FileNotFoundError("there is no C compiler")
        source, library = folder / "runtime.c", folder / "libcudart.so.99"
        source.write_text(SOURCE, encoding="utf-8")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        self.library = ctypes.PyDLL(str(library))

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int64.in_dll(self.library, f"stand_in_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int64.in_dll(self.library, f"stand_in_{name}").value = value

    def runtime(self, patch: Any) -> cuda_events.CudaRuntime:
        """The runtime as the tracer loads it.

        Args:
            patch: Replaces attributes, as pytest's ``monkeypatch``.
        """
        bindings = {
            "getCurrentRawStream": lambda _: self["stream"],
            "isCurrentStreamCapturing": lambda: bool(self["capturing"]),
            "getDevice": lambda: self["device"],
        }
        for name, function in bindings.items():
            patch.setattr(torch._C, f"_cuda_{name}", function, raising=False)
        libraries = {"libcudart.so.99": self.library, "libtorch_cuda.so": self.library}
        loading = SimpleNamespace(**{**vars(ctypes), "PyDLL": lambda n: libraries[Path(n).name]})
        patch.setattr(cuda_events, "ctypes", loading)
        patch.setattr(torch, "version", SimpleNamespace(cuda="99.1", hip=None))
        return cuda_events.CudaRuntime()
