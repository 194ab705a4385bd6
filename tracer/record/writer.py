"""The background thread that writes the recorded events to the stream."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from ddltrace.tracer.record.background_thread import lower_priority, until_next
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder, Taken
from ddltrace.tracer.record.watchdog import Watchdog
from ddltrace.tracer.trace.stream_writer import StreamWriter

_MAX_PAUSE_S: Final = 1.0

_LOOKS_PER_INTERVAL: Final = 4
"""Number of checks between two writes for buffers that fill faster than usual."""

_MOST_FILLED: Final = 0.25
"""Used share of a buffer from which the writer does not wait for the end of the interval."""

_RESERVE_BYTES: Final = 32 << 20
"""Address space reserved for the last writes of a rank that runs out of memory."""


class WriterThread(threading.Thread):
    """Writes one Arrow batch at every interval, or when a buffer fills, until it is stopped.

    While the disk takes nothing, batches wait (see `StreamWriter`); events that are not written in
    the end are counted as dropped. If there is no memory for a batch, its events are kept for the
    next write, up to the limit of the recorder. Some address space is reserved for them, so that
    the last events of a job that runs out of memory are written.

    Args:
        recorder: Holds the events to write.
        stream: Receives the batches.
        interval_s: The time between two writes.
        on_fault: Called with errors.
        on_beat: Called at every write with `active`, whether there are events, on this thread,
            because the job's threads never write to disk.
        on_end: Called after the last write with the number of written rows.
        watchdog: Checks the rank at every write.

    Attributes:
        on_batch: Called with each batch, on this thread; None for nothing.
    """

    def __init__(
        self,
        recorder: Recorder,
        stream: StreamWriter,
        interval_s: float,
        *,
        on_fault: Callable[[str, Exception], None],
        on_beat: Callable[..., None],
        on_end: Callable[[int], None],
        watchdog: Watchdog,
    ) -> None:
        super().__init__(name="ddltrace-writer", daemon=True)
        self._watchdog = watchdog
        self._recorder = recorder
        self._builder = BatchBuilder(recorder.sites, recorder.patterns, recorder.splits)
        self._stream = stream
        self._pending = Taken()
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._on_beat = on_beat
        self._on_end = on_end
        # A lock, since the wait of an event is a hundred lines of Python. Released to wake up the
        # thread, for one of the requests or to stop.
        self._wake = threading.Lock()
        self._wake.acquire()
        self._stopping = False
        self._requests: deque[threading.Event] = deque()
        self._writing = threading.RLock()
        self.on_batch: Callable[[pa.RecordBatch], None] | None = None
        self._is_short = False  # out of memory, for the newest batch
        self._reserve = _set_aside(_RESERVE_BYTES)
        self.rows = 0
        self.busy_ns = 0

    def run(self) -> None:
        """Writes until stopped, then once more."""
        try:
            lower_priority()
            written = self._interval_number()
            while not self._stopping:
                rests = self._recorder.rests() and not self._recorder.filled()
                pause_s = -1 if rests else until_next(self._interval_s / _LOOKS_PER_INTERVAL)
                self._wake.acquire(timeout=pause_s)
                now, requests = self._interval_number(), self._take_requests()
                if now != written or requests or self._recorder.filled() > _MOST_FILLED:
                    written = now
                    self._flush()
                for request in requests:
                    request.set()
            self._flush(last=True)
            self._on_end(self.rows)
            for request in self._take_requests():
                request.set()
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._fault("writer", error)

    def _interval_number(self) -> int:
        """The number of the current interval by the wall clock, which is equal on all ranks."""
        # A thread that wakes up slightly too early belongs to the next interval.
        early_s = self._interval_s / _LOOKS_PER_INTERVAL / 8
        return int((time.time() + early_s) / self._interval_s)

    def write_now(self, timeout_s: float) -> None:
        """Asks for a write without delay and waits for it.

        Args:
            timeout_s: Longest time to wait, in seconds.
        """
        if self.is_alive():
            request = threading.Event()
            self._requests.append(request)
            self._wake_up()
            request.wait(timeout_s)

    def ask(self) -> None:
        """Asks for a write without delay, and does not wait for it; ends a rest."""
        self._requests.append(threading.Event())
        self._wake_up()

    def stop(self, timeout_s: float) -> bool:
        """Requests the last write and waits for it.

        Returns:
            Whether the thread has ended.
        """
        self._stopping = True
        self._wake_up()
        self.join(timeout_s)
        return not self.is_alive()

    def _wake_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been released and not yet acquired
            self._wake.release()

    def _take_requests(self) -> list[threading.Event]:
        return [self._requests.popleft() for _ in range(len(self._requests))]

    def pause(self) -> None:
        """Waits for the current write, because a fork must not copy a partial one.

        The wait is limited, because a disk that does not respond must not block the job's fork.
        """
        self._writing.acquire(timeout=_MAX_PAUSE_S)

    def resume(self) -> None:
        """Resumes writing."""
        with contextlib.suppress(RuntimeError):  # the pause timed out and does not hold the lock
            self._writing.release()

    def _flush(self, *, last: bool = False) -> None:
        if last:
            self._release()
        with self._writing:
            try:
                self._collect()
                taken = self._recorder.take()
                # Before the rows, so that a reader finds their groups and tensors.
                self._beat(active=taken.rows > 0)
                self._watchdog.tick(active=taken.rows > 0 or self._recorder.paused)
                self._write(taken, last=last)
            except Exception as error:  # noqa: BLE001 - the job continues, the fault is recorded
                self._fault("flush", error)
        self.busy_ns = time.thread_time_ns()

    def _fault(self, where: str, error: Exception) -> None:
        if isinstance(error, MemoryError):
            self._release()
        self._on_fault(where, error)

    def _release(self) -> None:
        if self._reserve is not None:
            self._reserve.close()

    def _collect(self) -> None:
        for collect in self._recorder.collectors:
            try:
                collect()
            except Exception as error:  # noqa: BLE001 - ended messages then appear as open
                self._fault("collect", error)

    def _beat(self, *, active: bool) -> None:
        try:
            self._on_beat(active=active)
        except Exception as error:  # noqa: BLE001 - the rows are to be written
            self._fault("save", error)

    def _write(self, taken: Taken, *, last: bool) -> None:
        """Writes the taken events together with those left from previous writes."""
        self._pending.extend(taken)
        try:
            batch = self._builder.build(self._pending)
            self._is_short = False
        except Exception as error:  # noqa: BLE001 - memory may run out, for example
            if not self._is_short:
                self._is_short = True
                self._fault("build", error)
            if not last and self._pending.rows < self._recorder.buffer_rows:
                return  # kept for the next write
            self._recorder.dropped += self._pending.rows
        else:
            self._write_batch(batch, last=last)
        self._pending = Taken()

    def _write_batch(self, batch: pa.RecordBatch | None, *, last: bool) -> None:
        """Writes a batch, and what the disk did not take so far."""
        if batch is not None and self.on_batch is not None:
            self.on_batch(batch)
        missing = self._stream.missing
        try:
            self._stream.write(batch)
        except Exception as error:  # noqa: BLE001 - the job continues, the fault is recorded
            if self._stream.is_to_be_reported(last=last):
                self._fault("write", error)
        missing = self._stream.missing - missing
        self.rows += (0 if batch is None else batch.num_rows) - missing
        # Counted before it is known whether they can be written later: the rank may be killed.
        self._recorder.dropped += missing


def _set_aside(num_bytes: int) -> mmap.mmap | None:
    """Reserves address space for later, if enough is available.

    It is never accessed, so it uses no memory and counts only towards a limit of address space.
    """
    try:
        return mmap.mmap(-1, num_bytes)
    except OSError:
        return None
