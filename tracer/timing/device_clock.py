"""Times the work of a device on the host's clock, without synchronization.

The host only launches device work. Its cheapest way to time the work is to record an event into the
stream before and after it; the device stamps an event when it reaches it. This module resolves
such pairs outside the hot path: it relates a completed event to an *anchor*, an event whose host
time is known within a bracket. Streams and devices are never synchronized; events are only
queried.

CUDA gives the time between two events as a float32 in milliseconds, whose resolution decreases
with the distance: 0.06 us at one second, 1 us at ten. Therefore anchors are renewed often, which
also follows the drift between the two clocks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ddltrace.tracer.record.recorder import Recorder

_ANCHOR_PERIOD_NS: Final = 500_000_000
_ANCHOR_TRIES: Final = 5
# Frequent polling would compete with the job's threads for the interpreter lock.
_ANCHOR_TIMEOUT_NS: Final = 2_000_000
_ANCHOR_RETRY_NS: Final = 100_000_000
_MAX_UNRESOLVED: Final = 1 << 16


class DeviceEvent(Protocol):
    """An event of the device; see `CudaEvent`."""

    @property
    def handle(self) -> int:
        """Its address."""

    def record(self, stream: Any) -> None:
        """Records the event into a stream."""

    def query(self) -> bool:
        """Whether the device has completed the event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one."""


class _Mark:
    """A position in a stream.

    Attributes:
        event: The event recorded there.
        stream: The stream's number.
        uses: How many intervals it begins or ends that are not resolved.
        host_ns: When the device passed it; None if that was not asked yet.
    """

    __slots__ = ("event", "host_ns", "stream", "uses")

    def __init__(self, event: DeviceEvent, stream: int) -> None:
        self.event = event
        self.stream = stream
        self.uses = 1
        self.host_ns: int | None = None


@dataclass(frozen=True)
class Anchor:
    """A device event whose time on the host's clock is known.

    Attributes:
        event: The event.
        host_ns: Midpoint of the interval in which the event completed.
        error_ns: Half the length of that interval.
    """

    event: DeviceEvent
    host_ns: int
    error_ns: int


class DeviceClock:
    """Relates a device's events to the host's monotonic clock.

    Args:
        new_event: Creates a timing event.
        record_idle: Records an event into an otherwise unused stream, so that the device completes
            it at once.
        now: The host's clock.

    Attributes:
        max_error_ns: The largest possible error of a time: the largest `error_ns` of an anchor, or
            the largest correction when an anchor was replaced.
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
    def anchor(self) -> Anchor | None:
        """The event to which times refer; None if there is none yet."""
        return self._anchor

    def renew(self) -> bool:
        """Replaces the anchor if it is old.

        Returns:
            Whether an anchor exists.
        """
        now, former = self._now(), self._anchor
        if now < self._retry_ns or (former and now - former.host_ns < _ANCHOR_PERIOD_NS):
            return self._anchor is not None
        best: Anchor | None = None
        for _ in range(_ANCHOR_TRIES):
            found = self._take()
            if found is None:
                break
            if best is None or found.error_ns < best.error_ns:
                best = found
        if best is None:
            self._retry_ns = self._now() + _ANCHOR_RETRY_NS
            return self._anchor is not None
        drift = 0 if former is None else abs(self.host_ns(best.event) - best.host_ns)
        self._anchor = best
        self.max_error_ns = max(self.max_error_ns, best.error_ns + drift)
        return True

    def host_ns(self, event: DeviceEvent) -> int:
        """The host time at which the device completed an event."""
        anchor = self._anchor
        assert anchor is not None
        return anchor.host_ns + round(anchor.event.elapsed_time(event) * 1e6)

    def _take(self) -> Anchor | None:
        event = self._new_event()
        before = self._now()
        self._record_idle(event)
        deadline = before + _ANCHOR_TIMEOUT_NS
        # The event completes after the start of the last query that returned false and before the
        # end of the first query that returned true.
        asked = before
        while not event.query():
            before, asked = asked, self._now()
            if asked > deadline:
                return None  # the device is too busy for a useful bracket
        after = self._now()
        return Anchor(event, (before + after) // 2, (after - before) // 2)


class DeviceTimer:
    """Records when one device executed the work that the host launched.

    A mark is a position in a stream, given by its number. Where the C++ library can be used,
    `DeviceMarks` does the same.

    Args:
        recorder: Receives resolved intervals, as events of a stream's lane.
        clock: Relates events to the host's clock.
        new_event: Creates a timing event when the pool is empty.
        current_stream: Returns the device's current stream and its number.
        device: The device's index.
        is_capturing: Whether the current stream is captured.
        is_current: Whether the device is the thread's current one: an event belongs to the device
            that was current at its creation.

    Attributes:
        device: The device's index.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: DeviceClock,
        new_event: Callable[[], DeviceEvent],
        current_stream: Callable[[], tuple[Any, int]],
        *,
        device: int = 0,
        is_capturing: Callable[[], bool] = lambda: False,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._new_event = new_event
        self._current_stream = current_stream
        self._is_capturing = is_capturing
        self._is_current = is_current
        self._pool: deque[DeviceEvent] = deque()
        self._marks: dict[int, _Mark] = {}
        self._numbers = itertools.count()
        self._pending: deque[tuple[int | Callable[[int, int], None], int, int]] = deque()
        self._gradient: int | None = None
        self._used = True
        self.device = device

    @property
    def num_pending(self) -> int:
        """Number of intervals that are not known to be complete."""
        return len(self._pending)

    def mark(self, *, free: bool = False) -> int | None:
        """Records an event into the current stream.

        Args:
            free: Whether the stream is known not to be captured.

        Returns:
            Its number; None if the stream is being captured: launched work then becomes part of a
            graph and does not run. A capture can begin at any time.
        """
        if not self._is_current() or (not free and self._is_capturing()):
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._new_event()
        stream, number = self._current_stream()
        event.record(stream)
        self._used = True
        mark = next(self._numbers)
        self._marks[mark] = _Mark(event, number)
        return mark

    def keep(self, mark: int) -> None:
        """Adds one use of a mark."""
        self._marks[mark].uses += 1

    def forget(self, mark: int) -> None:
        """Gives up one use of a mark; without any, its event returns to the pool."""
        found = self._marks[mark]
        found.uses -= 1
        if not found.uses:
            del self._marks[mark]
            self._pool.append(found.event)

    def interval(
        self,
        site: int | Callable[[int, int], None],
        start: int | None,
        end: int | None = None,
    ) -> bool:
        """Ends an interval.

        Args:
            site: A number from `Recorder.site`, or a function to call with start and end when the
                device has completed both, instead of recording an event.
            start: A result of `mark`, of which this call consumes one use. If it lies in another
                stream, nothing is recorded: the time between the two belongs to neither stream.
            end: A result of `mark`, of which this call consumes one use; by default a new one in
                the current stream.

        Returns:
            Whether the interval will be recorded, or the function called.
        """
        if start is None:
            return False
        if end is None:
            end = self.mark()
        if end is None:
            self.forget(start)
            return False
        full = len(self._pending) >= _MAX_UNRESOLVED
        if full:
            self._recorder.dropped += 1
        if full or self._marks[start].stream != self._marks[end].stream:
            self.forget(start)
            self.forget(end)
            return False
        self._pending.append((site, start, end))
        return True

    def begin_gradients(self) -> None:
        """Begins a backward pass: the device's work for its first gradient begins here."""
        self.end_gradients()
        self._gradient = self.mark()

    def end_gradient(self, site: int) -> None:
        """Ends the device's work for one gradient and begins that for the next.

        The gradients of one device become ready on one thread.

        Args:
            site: The recording site of the work.
        """
        start, end = self._gradient, None
        if start is None:
            return
        self._gradient = None
        end = self.mark()
        if end is None:
            self.forget(start)
            return
        self.keep(end)  # the next gradient's work begins here
        self._gradient = end
        self.interval(site, start, end)

    def end_gradients(self) -> None:
        """Ends a backward pass."""
        mark, self._gradient = self._gradient, None
        if mark is not None:
            self.forget(mark)

    def passed_ns(self, mark: int) -> int | None:
        """The host time at which the device completed a mark; never blocks, callable by any thread.

        Args:
            mark: A result of `mark`, consumed by this call.

        Returns:
            The time; None if the mark is not completed, or there is no anchor yet.
        """
        try:
            found = self._marks[mark]
            if self._clock.anchor is None or not found.event.query():
                return None
            return self._host_ns(found)
        finally:
            self.forget(mark)

    def resolve(self) -> int:
        """Turns completed intervals into events.

        Returns:
            Number of resolved intervals.
        """
        if self._used:
            self._used = False
            self._clock.renew()
        resolved = 0
        # In launch order: a stream that lags delays the resolution of the others, but does not
        # change their times.
        while self._pending and self._marks[self._pending[0][2]].event.query():
            if not self._clock.renew():
                break
            site, start, end = self._pending.popleft()
            last = self._marks[end]
            start_ns, end_ns = self._host_ns(self._marks[start]), self._host_ns(last)
            if not isinstance(site, int):
                site(start_ns, end_ns)
            else:
                self._recorder.add(site, start_ns, end_ns, stream_lane(last.stream))
            self.forget(start)
            self.forget(end)
            resolved += 1
        return resolved

    def _host_ns(self, mark: _Mark) -> int:
        if mark.host_ns is None:
            mark.host_ns = self._clock.host_ns(mark.event)
        return mark.host_ns

    def abandon(self, *, lost_at_ns: int | None = None) -> None:
        """Gives up all pending intervals; those that would become events count as dropped.

        Args:
            lost_at_ns: Time at which the device failed, if it did: pending functions are called
                with it as the end, because no better time will be known.
        """
        pending = list(self._pending)
        self._pending.clear()
        waiting = [site for site, _, _ in pending if not isinstance(site, int)]
        if lost_at_ns is not None:
            for site in waiting:
                site(0, lost_at_ns)
        lost = len(pending) - len(waiting)  # before the addition; see `WriterThread._write`
        self._recorder.dropped += lost


def stream_lane(stream: int) -> int:
    """The lane number of a stream in the recorder's rows; thread idents are positive."""
    return -1 - stream
