"""Records the peak of a CUDA device's memory in each step.

Patched objects: the functions of `torch._C` that read and reset the allocator's statistics. They
are patched when the first step ends in which the job used a CUDA device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.resources.step_peaks import StepPeaks
from ddltrace.tracer.trace.counters import Reading

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext
    from ddltrace.tracer.resources.counter_thread import CounterThread

_READERS: Final = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETS: Final = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


class DeviceMemory:
    """Called at the end of each step, on the thread that trains."""

    def __init__(self, context: PatchContext, counters: CounterThread) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._bindings: Any = torch._C
        self._context = context
        self._counters = counters
        self._peaks: StepPeaks | None = None
        self._uuids: dict[int, str] = {}
        self._failed = False

    def after_step(self, step: int) -> None:
        """Records the peaks of a step; after a failure, no more."""
        if self._failed or not self._cuda.is_initialized():
            return
        try:
            self._record(step)
        except Exception as error:  # noqa: BLE001 - the job continues without these counters
            self._failed = True
            self._context.fault("device memory", error)

    def _record(self, step: int) -> None:
        device = self._cuda.current_device()
        if self._peaks is None:
            self._peaks = patch(self._bindings)
        if device not in self._uuids:
            uuid = f"GPU-{self._cuda.get_device_properties(device).uuid}"
            self._uuids[device] = uuid
            self._counters.use_device(uuid)
        uuid, peaks = self._uuids[device], self._peaks.end_step(device)
        self._counters.add(
            time.monotonic_ns(),
            step,
            Reading("device_allocated_peak", peaks.allocated, uuid),
            Reading("device_reserved_peak", peaks.reserved, uuid),
        )


def patch(bindings: Any) -> StepPeaks:
    """Lets steps reset the allocator's peaks without the job noticing.

    Args:
        bindings: `torch._C`.
    """
    peaks = StepPeaks(bindings._cuda_memoryStats, bindings._cuda_resetPeakMemoryStats)
    # The accelerator's functions, of PyTorch 2.8 and newer, read the same statistics.
    for names, replacement in ((_READERS, peaks.stats_for_job), (_RESETS, peaks.reset_by_job)):
        for name in names:
            if hasattr(bindings, name):
                setattr(bindings, name, replacement)
    return peaks
