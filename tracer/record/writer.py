"""The background thread that writes down what the recorder has gathered."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder, Taken
from ddltrace.tracer.record.tail import TailWriter
from ddltrace.tracer.record.watchdog import Watchdog
from ddltrace.tracer.trace.stream_writer import StreamWriter

_MAX_PAUSE_S: Final = 1.0

_ROWS_PER_BATCH: Final = 1 << 13
"""Rows that make a batch at once: then the cost of building it is theirs, not its own."""

_BALLAST_BYTES: Final = 32 << 20
"""Of address space, for the writes of a rank that gets no more of it."""


class WriterThread(threading.Thread):
    """Writes at every interval until it is stopped: into the tail, or a batch.

    A full or vanished disk ends the writing, never the job: what cannot be written is counted
    as dropped. So is what there is no memory for, but some is set aside: a job whose arrays have
    become too many ends with an error, and its last moments tell why.

    Args:
        recorder: What to write.
        stream: Where batches go.
        tail: Where goes what is not in a batch yet.
        interval_s: The time between two writes.
        on_fault: Is given what goes wrong.
        on_beat: Is called at every interval, on this thread: the job's never touch the disk.
        on_end: Is called after the last write, with the number of rows written.
        watchdog: Looks at the rank at every interval.
        batch_interval_s: The time between two batches; in between, the tail is written.
    """

    def __init__(
        self,
        recorder: Recorder,
        stream: StreamWriter,
        tail: TailWriter,
        interval_s: float,
        *,
        on_fault: Callable[[str, Exception], None],
        on_beat: Callable[[], None],
        on_end: Callable[[int], None],
        watchdog: Watchdog,
        batch_interval_s: float = 30.0,
    ) -> None:
        super().__init__(name="ddltrace-writer", daemon=True)
        self._watchdog = watchdog
        self._recorder = recorder
        self._builder = BatchBuilder(recorder.sites, recorder.patterns)
        self._stream = stream
        self._tail = tail
        self._tail.begin(0, self._builder.context())
        self._pending = Taken()
        self._batches = 0
        self._batch_due_s = 0.0
        self._interval_s = interval_s
        self._batch_interval_s = batch_interval_s
        self._on_fault = on_fault
        self._on_beat = on_beat
        self._on_end = on_end
        # Not an event, whose wait is a hundred lines of Python: held until the end is wanted.
        self._goes_on = threading.Lock()
        self._goes_on.acquire()
        self._writing = threading.RLock()
        self._broken = False
        self._tail_broken = False
        self._ballast = _set_aside(_BALLAST_BYTES)
        self.rows = 0
        self.busy_ns = 0

    def run(self) -> None:
        """Writes until stopped, then once more."""
        try:
            _come_after_the_job()
            self._batch_due_s = time.monotonic() + self._batch_interval_s
            while not self._goes_on.acquire(timeout=_until_next(self._interval_s)):
                self._flush()
            self._flush(last=True)
            self._on_end(self.rows)
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._fault("writer", error)

    def stop(self, timeout_s: float) -> bool:
        """Asks for the last write and waits for it.

        Returns:
            Whether the thread has ended.
        """
        with contextlib.suppress(RuntimeError):  # it was asked before
            self._goes_on.release()
        self.join(timeout_s)
        return not self.is_alive()

    def pause(self) -> None:
        """Waits for the write that is under way: a fork must not copy half of one.

        A disk that does not answer must not stop the job's fork, though.
        """
        self._writing.acquire(timeout=_MAX_PAUSE_S)

    def resume(self) -> None:
        """Lets the writing go on."""
        with contextlib.suppress(RuntimeError):  # the pause gave up: not ours to release
            self._writing.release()

    def _flush(self, *, last: bool = False) -> None:
        before = time.thread_time_ns()
        if last:
            self._release()
        with self._writing:
            try:
                self._collect()
                taken = self._recorder.take()
                # Before the rows: a reader of them finds their groups and tensors.
                self._beat()
                self._watchdog.tick(active=taken.rows > 0 or self._recorder.paused)
                self._write(taken, last=last)
            except Exception as error:  # noqa: BLE001 - the job goes on, the fault is recorded
                self._fault("flush", error)
        self.busy_ns += time.thread_time_ns() - before

    def _fault(self, where: str, error: Exception) -> None:
        if isinstance(error, MemoryError):
            self._release()
        self._on_fault(where, error)

    def _release(self) -> None:
        if self._ballast is not None:
            self._ballast.close()

    def _collect(self) -> None:
        for collect in self._recorder.collectors:
            try:
                collect()
            except Exception as error:  # noqa: BLE001 - what has ended shows as open
                self._fault("collect", error)

    def _beat(self) -> None:
        try:
            self._on_beat()
        except Exception as error:  # noqa: BLE001 - the rows are to be written
            self._fault("save", error)

    def _write(self, taken: Taken, *, last: bool) -> None:
        """Puts what was taken into the tail, or with all that is pending there into a batch.

        The tail keeps what no batch could be made of: only what fits neither is dropped.
        """
        self._pending.extend(taken)
        now_s = time.monotonic()
        due = last or now_s >= self._batch_due_s or self._pending.rows >= _ROWS_PER_BATCH
        written = due and self._write_batch()
        if not written and not self._note(taken):
            written = not due and self._write_batch()
            if not written:
                # Counted first: a call in the middle of the addition would let the job's threads,
                # which count, too, run there.
                lost = taken.rows
                self._recorder.dropped += lost
                self.rows -= lost
        if written or self._broken:
            self.rows += self._pending.rows
            self._pending = Taken()
        if written:
            self._batch_due_s = now_s + self._batch_interval_s
            self._begin_tail()
        if last:
            self._tail.close()

    def _begin_tail(self) -> None:
        """Empties the tail: all of it is in the stream now."""
        try:
            self._tail.begin(self._batches, self._builder.context())
        except Exception as error:  # noqa: BLE001 - the stream can do without
            self._tail_broken = True
            self._fault("tail", error)

    def _note(self, taken: Taken) -> bool:
        """Notes what was taken in the tail; one that it could not take is the last."""
        if self._tail_broken:
            return False
        if taken.rows or taken.step_changes or taken.phase_changes:
            try:
                self._tail.append(taken)
            except Exception as error:  # noqa: BLE001 - the job goes on, the fault is recorded
                self._tail_broken = True
                self._fault("tail", error)
                return False
        return True

    def _write_batch(self) -> bool:
        """Makes a batch of all that is pending; one that cannot be made or written is the last."""
        if self._broken:
            return False
        where = "build"
        try:
            batch = self._builder.build(self._pending)
            where = "write"
            if batch is not None:
                self._stream.write(batch)
                self._batches += 1
        except Exception as error:  # noqa: BLE001 - of memory, for example, there may be too little
            self._broken = True
            self._fault(where, error)
            self._stream.cut()
        return not self._broken


def _come_after_the_job() -> None:
    """Has this thread not interrupt others that work when it wakes up.

    It has time until the next write; a rank that is interrupted makes all others wait for it.
    """
    with contextlib.suppress(OSError, AttributeError):  # not on this system
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_BATCH, os.sched_param(0))


def _until_next(interval_s: float) -> float:
    """The time until a multiple of the interval, by the clock on the wall.

    All ranks write at the same moments: a rank that is kept from its work keeps all from theirs
    that wait for it, so it is better to be once for all of them than for each at its own time.
    """
    left_s = interval_s - time.time() % interval_s
    # A thread that wakes a moment too early has not missed anything.
    return left_s if left_s > interval_s / 8 else left_s + interval_s


def _set_aside(num_bytes: int) -> mmap.mmap | None:
    """Address space for later, if there is so much now.

    It is never touched, so it is no memory; only limits of what a process may ask for count it.
    """
    try:
        return mmap.mmap(-1, num_bytes)
    except OSError:
        return None
