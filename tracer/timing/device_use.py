"""The device of this process, the timer of its work, and the thread that resolves its times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddltrace.tracer.timing.device_clock import DeviceTimer
    from ddltrace.tracer.timing.device_marks import DeviceMarks

_POLL_S: Final = 0.005


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
        self.timer: DeviceTimer | DeviceMarks | None = None
        self.failed = False
        self.tasks: list[Callable[[], None]] = []
        self.when_failed: list[Callable[[], None]] = []

    def start(self, timer: DeviceTimer | DeviceMarks) -> None:
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


class ResolverThread(threading.Thread):
    """Resolves intervals periodically until it is stopped.

    Args:
        timer: The timer to resolve.
        on_fault: Called when the device's events fail; the thread and the timing end then.
        prepare: Called in the thread before anything else.
        tasks: Called in every period.
    """

    def __init__(
        self,
        timer: DeviceTimer | DeviceMarks,
        on_fault: Callable[[str, Exception], None],
        prepare: Callable[[], None],
        tasks: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(name="ddltrace-device", daemon=True)
        self._timer = timer
        self._on_fault = on_fault
        self._prepare = prepare
        self._tasks = tasks
        self._stop_requested = threading.Event()

    def run(self) -> None:
        """Resolves until stopped or until the device's events fail."""
        try:
            self._prepare()
            while not self._stop_requested.wait(_POLL_S):
                self._timer.resolve()
                for task in self._tasks:
                    task()
        except Exception as error:  # noqa: BLE001 - the job continues without device times
            self._on_fault("device clock", error)
            self._timer.abandon(lost_at_ns=time.monotonic_ns())

    def stop(self, timeout_s: float) -> bool:
        """Waits up to the time-out for the device to complete the last events, then gives up.

        Returns:
            Whether the thread has ended.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and self._timer.num_pending and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._stop_requested.set()
        self.join(max(0.1, deadline - time.monotonic()))
        if not self.is_alive():
            self._timer.abandon()
        return not self.is_alive()
