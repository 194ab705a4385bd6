"""Events of the CUDA or HIP runtime, called directly.

`torch.cuda.Event` releases the interpreter lock in most of its methods: the job's thread and the
one that resolves events would take it from each other at every event, which costs more than the
event itself. And it makes a Python object of each stream.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

_NOT_READY: Final = 600  # cudaErrorNotReady, hipErrorNotReady, CUDA_ERROR_NOT_READY


class DeviceError(RuntimeError):
    """A call of the runtime failed; nothing more is known of the device's work."""


class CudaRuntime:
    """The functions of the runtime library that PyTorch has loaded.

    Attributes:
        current_stream: Address of a device's current stream.
        is_capturing: Whether the current stream is captured.
        current_device: Index of the thread's current device.

    Raises:
        OSError: There is no such library.
    """

    def __init__(self) -> None:
        import torch

        bindings: Any = torch._C
        self.current_stream = bindings._cuda_getCurrentRawStream
        self.is_capturing = bindings._cuda_isCurrentStreamCapturing
        self.current_device = bindings._cuda_getDevice
        # PyDLL keeps the interpreter lock: no call waits for the device.
        library, prefix, create = _load(torch.version)
        pointer = ctypes.c_void_p
        self._create = _function(library, create, ctypes.POINTER(pointer), ctypes.c_uint)
        self._record = _function(library, f"{prefix}EventRecord", pointer, pointer)
        self._query = _function(library, f"{prefix}EventQuery", pointer)
        self._elapsed = _function(
            library, f"{prefix}EventElapsedTime", ctypes.POINTER(ctypes.c_float), pointer, pointer
        )
        # A query that finds an event not ready leaves an error behind, for this thread.
        self._clear = getattr(library, f"{prefix}GetLastError", int)
        self._library, self._prefix = library, prefix

    def new_event(self) -> CudaEvent:
        """Creates a timing event on the current device. It lasts until the process ends."""
        handle = ctypes.c_void_p()
        self.check(self._create(ctypes.byref(handle), 0))
        return CudaEvent(self, handle.value or 0)

    def functions(self) -> ctypes.Array[ctypes.c_void_p]:
        """Addresses of the functions that `native/device_marks.cpp` calls, in its order.

        Raises:
            AttributeError: One of them is missing.
            OSError: PyTorch's library of the device is missing.
        """
        import torch

        # The stable C interface of PyTorch's C++ library (torch/csrc/inductor/aoti_torch/c/shim.h).
        name = "libtorch_hip.so" if self._prefix == "hip" else "libtorch_cuda.so"
        pytorch = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / name))
        library, prefix = self._library, self._prefix
        device = f"{prefix}CtxGetDevice" if prefix == "cu" else f"{prefix}GetDevice"
        found = [
            *(self._create, self._record, self._query, self._elapsed),
            getattr(library, f"{prefix}StreamIsCapturing"),
            getattr(library, device),
            getattr(library, f"{prefix}GetLastError", None),
            pytorch.aoti_torch_get_current_cuda_stream,
        ]
        addresses = [None if one is None else ctypes.cast(one, ctypes.c_void_p) for one in found]
        return (ctypes.c_void_p * len(addresses))(*addresses)

    @staticmethod
    def check(status: int) -> None:
        """Raises `DeviceError` for the status of a failed call."""
        if status:
            raise DeviceError(f"CUDA error {status}")


class CudaEvent:
    """An event that takes the device's time.

    Args:
        runtime: The library.
        handle: Its address.
    """

    __slots__ = ("_runtime", "handle")

    def __init__(self, runtime: CudaRuntime, handle: int) -> None:
        self._runtime = runtime
        self.handle = handle

    def record(self, stream: int) -> None:
        """Records the event into a stream, given by its address."""
        status = self._runtime._record(self.handle, stream)
        if status:
            self._runtime.check(status)

    def query(self) -> bool:
        """Whether the device has completed the event."""
        status = self._runtime._query(self.handle)
        if status == _NOT_READY:
            self._runtime._clear()
            return False
        self._runtime.check(status)
        return True

    def elapsed_time(self, end: CudaEvent) -> float:
        """Milliseconds from this event to a later one; both are complete."""
        found = ctypes.c_float()
        self._runtime.check(self._runtime._elapsed(ctypes.byref(found), self.handle, end.handle))
        return found.value


def _load(version: Any) -> tuple[ctypes.PyDLL, str, str]:
    """The library, the prefix of its names, and the name of the function that creates events."""
    if version.hip:
        library = ctypes.PyDLL(f"libamdhip64.so.{version.hip.split('.')[0]}")
        return library, "hip", "hipEventCreateWithFlags"
    try:
        library = ctypes.PyDLL(f"libcudart.so.{version.cuda.split('.')[0]}")
        return library, "cuda", "cudaEventCreateWithFlags"
    except OSError:  # PyTorch contains it; the driver has the same functions
        return ctypes.PyDLL("libcuda.so.1"), "cu", "cuEventCreate"


def _function(library: ctypes.PyDLL, name: str, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = arguments
    return function
