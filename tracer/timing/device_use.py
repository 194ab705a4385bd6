"""The device of this process, and the timer of its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.timing.device_clock import DeviceTimer


class DeviceUse:
    """The one device of this process that is timed, from its first use by the job.

    Args:
        on_start: Called at the first use.

    Attributes:
        timer: Times the device's work; None before the first use and after a failure.
        failed: Whether timing failed; it is not tried again.
        tasks: Called often while the device is timed, on the thread that asks it.
        when_failed: Called when timing has failed: `tasks` are called no more.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self.timer: DeviceTimer | None = None
        self.failed = False
        self.tasks: list[Callable[[], None]] = []
        self.when_failed: list[Callable[[], None]] = []

    def start(self, timer: DeviceTimer) -> None:
        """Starts timing: the job uses a device."""
        self.timer = timer
        self._on_start()

    def fail(self) -> None:
        """Stops timing for good after a failure."""
        self.timer, self.failed = None, True
        for call in self.when_failed:
            call()

    def forget(self) -> None:
        """Stops timing in a forked child, which cannot use its parent's device."""
        self.timer = None
