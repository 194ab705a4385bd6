"""Counters of one NVIDIA device, read with NVML (the package nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ddltrace.tracer.trace.counters import Reading


class NvmlCounters:
    """Reads the counters of one device.

    Args:
        uuid: The device's UUID, as NVML names it (``GPU-...``): its number can be another one
            for PyTorch (``CUDA_VISIBLE_DEVICES``).

    Raises:
        ImportError: nvidia-ml-py is not installed.
        Exception: NVML does not start, or does not know the device (`pynvml.NVMLError`).
    """

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._instance = uuid

    def sample(self) -> Iterator[Reading]:
        """Reads every counter once; a counter that the device does not have is left out."""
        nvml = self._nvml
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        if utilization is not None:
            yield self._reading("device_utilization", utilization.gpu / 100)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        if memory is not None:
            yield self._reading("device_memory_used", memory.used)
            yield self._reading("device_memory_total", memory.total)
        for name, value, unit in (
            ("device_power", self._ask(nvml.nvmlDeviceGetPowerUsage), 1e-3),  # from mW
            (
                "device_temperature",
                self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
                1.0,
            ),
            ("device_sm_clock", self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM), 1.0),
            (
                "device_memory_clock",
                self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
                1.0,
            ),
            ("device_throttling", self._ask(self._throttle_function()), 1.0),
        ):
            if value is not None:
                yield self._reading(name, value * unit)

    def _reading(self, name: str, value: float) -> Reading:
        return Reading(name, float(value), self._instance)

    def _throttle_function(self) -> Callable[[Any], int]:
        """NVML's function for the reasons of a reduced clock, which was renamed in 2023."""
        newer = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        found: Callable[[Any], int] = newer or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return found

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """An answer of NVML; None if this device does not give it."""
        try:
            return function(self._device, *arguments)
        except self._nvml.NVMLError:
            return None
