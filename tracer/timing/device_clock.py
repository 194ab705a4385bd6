"""When work really ran on a device, on the host's clock, without making anybody wait.

The host only launches device work. What the launching thread can do cheaply is to record an
event into the stream before and after; the device stamps it when it gets there. Here such
pairs are resolved off the hot path: an event that has passed is read against an *anchor*, an
event whose host time is known within a bracket. Nothing here synchronizes a stream or the
device: events are only queried.

CUDA gives the time between two events as a float32 of milliseconds, whose step grows with the
distance: 0.06 us at one second, 1 us at ten. So anchors are renewed often, which also
follows the drift of the two clocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ddltrace.tracer.record.recorder import Recorder

_ANCHOR_PERIOD_NS: Final = 500_000_000
_ANCHOR_TRIES: Final = 5
# Looking again and again competes with the job's threads for the interpreter.
_ANCHOR_TIMEOUT_NS: Final = 2_000_000
_ANCHOR_RETRY_NS: Final = 100_000_000
_MAX_UNRESOLVED: Final = 1 << 16
_POLL_S: Final = 0.005


class DeviceEvent(Protocol):
    """What is used of ``torch.cuda.Event(enable_timing=True)``."""

    def record(self, stream: Any = None) -> None:
        """Puts the event into a stream, by default the current one."""

    def query(self) -> bool:
        """Whether the device has passed the event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one."""


@dataclass(frozen=True)
class Mark:
    """A place in a stream.

    Attributes:
        event: The event that was recorded there.
        stream: Number of the stream.
    """

    event: DeviceEvent
    stream: int


@dataclass(frozen=True)
class Anchor:
    """A device event whose time on the host's clock is known.

    Attributes:
        event: The event.
        host_ns: The middle of the bracket in which it passed.
        error_ns: Half the bracket.
    """

    event: DeviceEvent
    host_ns: int
    error_ns: int


class DeviceClock:
    """Relates a device's events to the host's monotonic clock.

    Args:
        new_event: Makes a timing event.
        record_idle: Records an event into a stream that nothing else uses, so that the device
            passes it at once.
        now: The host's clock.

    Attributes:
        max_error_ns: How far a time may be off: the largest half bracket of an anchor, and by
            how much an anchor was off when the next one took its place.
    """

    def __init__(
        self,
        new_event: Callable[[], DeviceEvent],
        record_idle: Callable[[DeviceEvent], None],
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._new_event = new_event
        self._record_idle = record_idle
        self._now = now
        self._anchor: Anchor | None = None
        self._retry_ns = 0
        self.max_error_ns = 0

    @property
    def is_set(self) -> bool:
        """Whether there is an anchor to use."""
        return self._anchor is not None

    def renew(self) -> bool:
        """Takes a new anchor if the present one is old.

        Returns:
            Whether there is an anchor to use.
        """
        now, former = self._now(), self._anchor
        if now < self._retry_ns or (former and now - former.host_ns < _ANCHOR_PERIOD_NS):
            return self.is_set
        best: Anchor | None = None
        for _ in range(_ANCHOR_TRIES):
            found = self._take()
            if found is None:
                break
            if best is None or found.error_ns < best.error_ns:
                best = found
        if best is None:
            self._retry_ns = self._now() + _ANCHOR_RETRY_NS
            return self.is_set
        drift = 0 if former is None else abs(self.host_ns(best.event) - best.host_ns)
        self._anchor = best
        self.max_error_ns = max(self.max_error_ns, best.error_ns + drift)
        return True

    def host_ns(self, event: DeviceEvent) -> int:
        """The host's time at which the device passed an event that has passed."""
        anchor = self._anchor
        assert anchor is not None
        return anchor.host_ns + round(anchor.event.elapsed_time(event) * 1e6)

    def _take(self) -> Anchor | None:
        event = self._new_event()
        before = self._now()
        self._record_idle(event)
        deadline = before + _ANCHOR_TIMEOUT_NS
        # The device passes the event after the last look that did not see it has begun, and before
        # the first that does has ended.
        asked = before
        while not event.query():
            before, asked = asked, self._now()
            if asked > deadline:
                return None  # the device is too busy to be asked just now
        after = self._now()
        return Anchor(event, (before + after) // 2, (after - before) // 2)


class DeviceTimer:
    """Records when one device did what the host launched.

    Args:
        recorder: Where resolved intervals go, as events of a stream's lane.
        clock: Relates events to the host's clock.
        new_event: Makes a timing event, when the pool is empty.
        current_stream: The stream of this device that work is launched into now, and a number
            for it.
        device: The device's index.
        may_record: Whether events may be put into the current stream: not while it is captured.

    Attributes:
        device: The device's index.
        unresolved: Intervals given up because the device never passed their events in time.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: DeviceClock,
        new_event: Callable[[], DeviceEvent],
        current_stream: Callable[[], tuple[Any, int]],
        *,
        device: int = 0,
        may_record: Callable[[], bool] = lambda: True,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._new_event = new_event
        self._current_stream = current_stream
        self._may_record = may_record
        self._pool: deque[DeviceEvent] = deque()
        self._pending: deque[tuple[int | Callable[[int, int], None], Mark, Mark]] = deque()
        self._used = True
        self.device = device
        self.unresolved = 0

    @property
    def num_pending(self) -> int:
        """Intervals that the device has not been seen to pass."""
        return len(self._pending)

    def mark(self) -> Mark | None:
        """Records an event into the current stream.

        Returns:
            Where it is; None if the stream is being captured: what is launched into it then
            becomes part of a graph, and does not run. A capture can begin at any time.
        """
        if not self._may_record():
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._new_event()
        stream, number = self._current_stream()
        event.record(stream)
        self._used = True
        return Mark(event, number)

    def forget(self, mark: Mark) -> None:
        """Gives back a mark that is not needed after all; not to be used again."""
        self._pool.append(mark.event)

    def interval(self, site: int | Callable[[int, int], None], start: Mark | None) -> bool:
        """Ends an interval in the current stream.

        Args:
            site: What it is, a number from `Recorder.site`; or what to call with its start and
                end when the device has passed them, instead of recording it.
            start: What `mark` gave; not to be used again. If that was in another stream, what
                lies between the two is no work of either, and nothing is recorded.

        Returns:
            Whether it will be recorded or called.
        """
        if start is None:
            return False
        end = self.mark()
        if end is None:
            self.forget(start)
            return False
        full = len(self._pending) >= _MAX_UNRESOLVED
        if full:
            self._recorder.dropped += 1
        if full or start.stream != end.stream:
            self._pool.extend((start.event, end.event))
            return False
        self._pending.append((site, start, end))
        return True

    def passed_ns(self, mark: Mark) -> int | None:
        """When the device passed a mark, on the host's clock; never blocks, from any thread.

        Args:
            mark: What `mark` gave; not to be used again.

        Returns:
            The time; None if the device has not passed it, or the clock cannot tell yet.
        """
        try:
            if not self._clock.is_set or not mark.event.query():
                return None
            return self._clock.host_ns(mark.event)
        finally:
            self.forget(mark)

    def resolve(self) -> int:
        """Turns the intervals that the device has passed into events.

        Returns:
            How many were resolved.
        """
        if self._used:
            self._used = False
            self._clock.renew()
        resolved = 0
        # In order of launch: what one stream has not passed holds back the others a little,
        # which costs time but no truth.
        while self._pending and self._pending[0][2].event.query():
            if not self._clock.renew():
                break
            site, start, end = self._pending.popleft()
            start_ns, end_ns = self._clock.host_ns(start.event), self._clock.host_ns(end.event)
            if not isinstance(site, int):
                site(start_ns, end_ns)
            else:
                self._recorder.add(site, start_ns, end_ns, stream_lane(end.stream))
            self._pool.extend((start.event, end.event))
            resolved += 1
        return resolved

    def abandon(self, *, lost_at_ns: int | None = None) -> None:
        """Counts what will not be resolved any more.

        Args:
            lost_at_ns: When the device failed, where that is why: whoever waits to be called is
                called with that as the end, since nobody will know better.
        """
        pending = list(self._pending)
        self._pending.clear()
        self.unresolved += len(pending)
        waiting = [site for site, _, _ in pending if not isinstance(site, int)]
        if lost_at_ns is not None:
            for site in waiting:
                site(0, lost_at_ns)
        lost = len(pending) - len(waiting)  # before the addition; see `WriterThread._write`
        self._recorder.dropped += lost


def stream_lane(stream: int) -> int:
    """The lane number of a stream in the recorder's rows: thread idents are positive."""
    return -1 - stream


class ResolverThread(threading.Thread):
    """Resolves intervals now and then until it is stopped.

    Args:
        timer: What to resolve.
        on_fault: Told when the device's events fail, which ends the thread and the timing.
        prepare: Called in the thread before anything else.
    """

    def __init__(
        self,
        timer: DeviceTimer,
        on_fault: Callable[[str, Exception], None],
        prepare: Callable[[], None],
    ) -> None:
        super().__init__(name="ddltrace-device", daemon=True)
        self._timer = timer
        self._on_fault = on_fault
        self._prepare = prepare
        self._stop_requested = threading.Event()

    def run(self) -> None:
        """Resolves until stopped or until the device's events fail."""
        try:
            self._prepare()
            while not self._stop_requested.wait(_POLL_S):
                self._timer.resolve()
        except Exception as error:  # noqa: BLE001 - the job goes on without device times
            self._on_fault("device clock", error)
            self._timer.abandon(lost_at_ns=time.monotonic_ns())

    def stop(self, timeout_s: float) -> bool:
        """Gives the device the time-out to pass the last events, then gives up the rest.

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
