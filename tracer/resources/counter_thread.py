"""The background thread that reads resource counters and writes them to the trace."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from ddltrace.tracer.record.background_thread import lower_priority, until_next
from ddltrace.tracer.resources.host_counters import HostCounters
from ddltrace.tracer.resources.nvml_counters import NvmlCounters
from ddltrace.tracer.resources.tcp_connections import TcpConnections
from ddltrace.tracer.trace.counters import COUNTERS, CounterRows, Reading
from ddltrace.tracer.trace.stream_writer import StreamWriter

_MAX_PAUSE_S: Final = 1.0
_CONNECTIONS_EVERY: Final = 5
"""Samples from one reading of the connections to the next: their counters are sums."""

_MAX_WAITING: Final = 10_000
"""Readings of the job's threads that may wait for the next write; older ones are dropped."""


class CounterThread(threading.Thread):
    """Reads all counters at every interval and appends one Arrow batch, until it is stopped.

    Only `add` and `use_device` run on the job's threads; they only append. Counters that cannot be
    read are left out. While the disk takes nothing, batches wait; see `StreamWriter`.

    Args:
        path: The file to create.
        whole_host: Whether this process reads the counters of its host.
        step: Returns the current step.
        rests: Returns whether nothing is to be recorded now.
        on_fault: Receives failures.
        interval_s: The time between two samples.

    Attributes:
        dropped: Readings that could not be written so far.
        busy_ns: Processor time of the thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        whole_host: bool,
        step: Callable[[], int | None],
        rests: Callable[[], bool],
        on_fault: Callable[[str, Exception], None],
        interval_s: float = 1.0,
    ) -> None:
        super().__init__(name="ddltrace-counters", daemon=True)
        self._path = path
        self._step = step
        self._rests = rests
        self._on_fault = on_fault
        self._interval_s = interval_s
        self._waiting: deque[tuple[int, int | None, Reading]] = deque(maxlen=_MAX_WAITING)
        self._rows = CounterRows()
        self._stream: StreamWriter | None = None
        self._host = _host_counters(whole_host=whole_host)
        self._connections = TcpConnections()
        self._num_samples = 0
        self._devices: dict[str, NvmlCounters | None] = {}
        self._wanted_devices: deque[str] = deque(maxlen=64)
        self._running_lock = threading.Lock()
        self._running_lock.acquire()
        self._awake = threading.Event()
        # Reentrant, so that only the thread that has acquired it can release it.
        self._sampling = threading.RLock()
        self.dropped = 0
        self.busy_ns = 0

    def use_device(self, uuid: str) -> None:
        """Adds a device whose counters are read from the next sample on."""
        self._wanted_devices.append(uuid)

    def add(self, time_ns: int, step: int | None, *readings: Reading) -> None:
        """Adds readings of the job's own threads to the next batch."""
        for reading in readings:
            self._waiting.append((time_ns, step, reading))

    def run(self) -> None:
        """Samples until stopped, then once more."""
        try:
            lower_priority()
            with self._sampling:
                self._stream = StreamWriter(self._path, COUNTERS)
            self._sample()
            while not self._running_lock.acquire(timeout=until_next(self._interval_s)):
                self._sample()
                self._awake.clear()
                if self._rests():
                    self._awake.wait()
            self._sample(last=True)
            self._stream.close()
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._on_fault("counters", error)

    def stop(self, timeout_s: float) -> None:
        """Requests the last sample and waits for it."""
        with contextlib.suppress(RuntimeError):  # already requested
            self._running_lock.release()
        self._awake.set()
        if self.is_alive():
            self.join(timeout_s)

    def wake_up(self) -> None:
        """Ends a rest."""
        self._awake.set()

    def pause(self) -> None:
        """Waits for the current write, because a fork must not copy a partial one."""
        self._sampling.acquire(timeout=_MAX_PAUSE_S)

    def resume(self) -> None:
        """Resumes sampling."""
        with contextlib.suppress(RuntimeError):  # `pause` timed out and holds nothing
            self._sampling.release()

    def abandon(self) -> None:
        """In a forked child: leaves the file to the parent."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.abandon()

    def _sample(self, *, last: bool = False) -> None:
        with self._sampling:
            now_ns, step = time.monotonic_ns(), self._step()
            rows = [(now_ns, step, reading) for reading in self._read(last=last)]
            while self._waiting:
                rows.append(self._waiting.popleft())
            if self._stream is not None:
                self._write(self._stream, self._rows.batch(rows) if rows else None, last=last)
            self.busy_ns = time.thread_time_ns()

    def _write(self, stream: StreamWriter, batch: pa.RecordBatch | None, *, last: bool) -> None:
        try:
            stream.write(batch)
        except OSError as error:
            if stream.is_to_be_reported(last=last):
                self._on_fault("counters", error)
        self.dropped = stream.missing

    def _read(self, *, last: bool) -> Iterator[Reading]:
        if self._host is not None:
            yield from self._host.sample()
        if last or self._num_samples % _CONNECTIONS_EVERY == 0:
            yield from self._connections.sample()
        self._num_samples += 1
        while self._wanted_devices:
            uuid = self._wanted_devices.popleft()
            if uuid not in self._devices:
                self._devices[uuid] = _device(uuid)
        for device in self._devices.values():
            if device is not None:
                yield from device.sample()


def _host_counters(*, whole_host: bool) -> HostCounters | None:
    """The reader of the process's and the host's counters; None without psutil.

    It is made on the job's thread: importing psutil evaluates strings. If another thread does that
    while a KeyboardInterrupt ends the interpreter, CPython forgets the interrupt and the process
    exits with status 1 instead of ending by SIGINT.
    """
    # A job may hide the package, or run where ddltrace's dependencies are incomplete.
    try:
        return HostCounters(whole_host=whole_host)
    except ImportError:
        return None


def _device(uuid: str) -> NvmlCounters | None:
    """The reader of a device; None without nvidia-ml-py, or if NVML does not know the device."""
    try:
        return NvmlCounters(uuid)
    except Exception:  # noqa: BLE001 - the trace has no counters of this device then
        return None
