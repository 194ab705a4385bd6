"""Times the work of a device with marks that C++ records and resolves.

``native/device_marks.cpp`` does what `DeviceTimer` does in Python: a mark is one call, gradients
are marked without Python, and the thread that resolves marks does not hold the interpreter lock.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.record.recorder import FLAT_CELLS, Recorder
from ddltrace.tracer.timing.cuda_events import DeviceError
from ddltrace.tracer.timing.device_clock import DeviceClock

if TYPE_CHECKING:
    from ddltrace.tracer.native.library import NativeLibrary

_ERROR: Final = -2
_FULL: Final = -3
_ROWS_AT_ONCE: Final = 1024
_NEW: Final = -1  # in place of a mark: record one


class DeviceMarks:
    """Records when one device executed the work that the host launched; see `DeviceTimer`.

    Args:
        functions: The runtime's functions, from `CudaRuntime.functions`.
        recorder: Receives resolved intervals, as events of a stream's lane.
        clock: Relates events to the host's clock; its events are `CudaEvent`.
        device: The device's index.

    Attributes:
        device: The device's index.
    """

    def __init__(
        self,
        library: NativeLibrary,
        functions: Any,
        recorder: Recorder,
        clock: DeviceClock,
        device: int,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._functions = functions
        calls = library.marks
        self._mark, self._interval = calls["mark"], calls["mark_interval"]
        self._passed, self._resolve = calls["mark_passed"], calls["marks_resolve"]
        self._abandon, self._ask_state = calls["marks_abandon"], calls["marks_state"]
        self._gradients = calls["marks_gradients"]
        self.keep: Callable[[int], None] = calls["mark_keep"]
        self.forget: Callable[[int], None] = calls["mark_forget"]
        self.end_gradient: Callable[[int], None] = calls["marks_end_gradient"]
        self.stop: Callable[[], None] = calls["marks_stop"]
        self._rows = array("q", bytes(8 * FLAT_CELLS * _ROWS_AT_ONCE))
        self._rows_at = self._rows.buffer_info()[0]
        # Functions to call with an interval's times, by the negative number in place of a site.
        self._calls: dict[int, Callable[[int, int], None]] = {}
        self._numbers = itertools.count(-1, -1)
        self._recorded = -1
        self.device = device
        calls["marks_start"](ctypes.addressof(functions), device)

    @property
    def num_pending(self) -> int:
        """Number of intervals that are not known to be complete."""
        return self._state()[0]

    @property
    def num_events(self) -> int:
        """Number of events created."""
        return self._state()[2]

    def mark(self, *, free: bool = False) -> int | None:
        """See `DeviceTimer.mark`."""
        number: int = self._mark(free)
        self._check(number)
        return number if number >= 0 else None

    def interval(
        self, site: int | Callable[[int, int], None], start: int | None, end: int | None = None
    ) -> bool:
        """See `DeviceTimer.interval`."""
        if start is None:
            return False
        call = None if isinstance(site, int) else site
        key = site if isinstance(site, int) else next(self._numbers)
        if call is not None:
            self._calls[key] = call
        status: int = self._interval(key, start, _NEW if end is None else end)
        if status == 1:
            return True
        self._calls.pop(key, None)
        if status == _FULL:
            self._recorder.dropped += 1
        self._check(status)
        return False

    def begin_gradients(self) -> None:
        """See `DeviceTimer.begin_gradients`."""
        self._gradients(1)

    def end_gradients(self) -> None:
        """See `DeviceTimer.end_gradients`."""
        self._gradients(0)

    def passed_ns(self, mark: int) -> int | None:
        """See `DeviceTimer.passed_ns`."""
        anchor = self._clock.anchor
        if anchor is None:
            self.forget(mark)
            return None
        found: int = self._passed(mark, anchor.event.handle, anchor.host_ns)
        self._check(found)
        return found if found >= 0 else None

    def resolve(self) -> int:
        """Turns completed intervals into events.

        Returns:
            Number of resolved intervals.

        Raises:
            DeviceError: A call of the runtime has failed.
        """
        pending, recorded, _, error = self._state()
        if error:
            self._check(_ERROR)
        if recorded != self._recorded:
            self._recorded = recorded
            self._clock.renew()
        resolved, count = 0, _ROWS_AT_ONCE
        while pending and count == _ROWS_AT_ONCE and self._clock.renew():
            anchor = self._clock.anchor
            assert anchor is not None
            count = self._resolve(anchor.event.handle, anchor.host_ns, self._rows_at, _ROWS_AT_ONCE)
            self._check(count)
            self._take(count)
            resolved += count
        return resolved

    def abandon(self, *, lost_at_ns: int | None = None) -> None:
        """See `DeviceTimer.abandon`."""
        lost: int = self._abandon()
        calls, self._calls = self._calls, {}
        if lost_at_ns is not None:
            for call in calls.values():
                call(0, lost_at_ns)
        self._recorder.dropped += lost - len(calls)

    def _take(self, count: int) -> None:
        """Records the first intervals of `_rows`."""
        cells = memoryview(self._rows)[: FLAT_CELLS * count]
        if not self._calls:
            self._recorder.add_rows(cells)
            return
        for at in range(0, len(cells), FLAT_CELLS):
            site, start_ns, end_ns, _ = cells[at : at + FLAT_CELLS]
            if site < 0:
                self._calls.pop(site)(start_ns, end_ns)
            else:
                self._recorder.add_rows(cells[at : at + FLAT_CELLS])

    def _state(self) -> tuple[int, int, int, int]:
        found = (ctypes.c_int64 * 4)()
        self._ask_state(ctypes.addressof(found))
        return found[0], found[1], found[2], found[3]

    def _check(self, result: int) -> None:
        """Raises `DeviceError` for the result of a call that failed."""
        if result == _ERROR:
            raise DeviceError(f"CUDA error {self._state()[3]}")
