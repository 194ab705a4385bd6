"""Whether this process computes on a device, and what times its work there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.timing.device_clock import DeviceTimer


class DeviceUse:
    """The one device of this process whose work is timed, once the job is seen to use it.

    Args:
        on_start: Is called when the job is first seen to use a device.

    Attributes:
        timer: Times the device's work; None while no device is used, or after a failure.
        failed: Whether timing failed: it is not tried again.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self.timer: DeviceTimer | None = None
        self.failed = False

    def start(self, timer: DeviceTimer) -> None:
        """The job uses a device."""
        self.timer = timer
        self._on_start()

    def fail(self) -> None:
        """Timing failed: no device times from now on."""
        self.timer, self.failed = None, True

    def forget(self) -> None:
        """In a forked child, which cannot use its parent's device."""
        self.timer = None
