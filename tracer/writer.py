"""The background thread that turns the recorder's buffers into Arrow batches on disk."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.tracer import arrays
from ddltrace.tracer.recorder import KIND_CODE, Message, Recorder
from ddltrace.tracer.schema import EVENTS, KINDS, OPS, PHASES, STATUSES
from ddltrace.tracer.store import StreamWriter
from ddltrace.tracer.watchdog import Watchdog

_MAX_PAUSE_S: Final = 1.0
_KEPT_CHANGES: Final = 4096
_OVERFLOW: Final = "(too many names)"
_MESSAGE: Final = KIND_CODE["message"]
_WAIT: Final = KIND_CODE["wait"]

# A batch is built as one table of integers, a row of it for each column but the last; -1 is null.
_TENSORS: Final = EVENTS.field("tensors").type
_INTEGER_FIELDS: Final = [field for field in EVENTS if field.name != "tensors"]
_ROW_OF: Final = {field.name: row for row, field in enumerate(_INTEGER_FIELDS)}
_STORED_TYPES: Final = [
    field.type.index_type if pa.types.is_dictionary(field.type) else field.type
    for field in _INTEGER_FIELDS
]


def _rows_of(names: str) -> list[int]:
    return [_ROW_OF[name] for name in names.split()]


_FLAT_COLUMNS: Final = _rows_of("start_ns end_ns kind name lane")
_MESSAGE_COLUMNS: Final = _rows_of(
    "start_ns end_ns kind name lane step phase id op group seq peer tag bytes out_bytes dtype "
    "enqueue_ns status"
)
_WAIT_COLUMNS: Final = _rows_of("start_ns end_ns kind name lane parent")


class Vocabulary:
    """Strings numbered in order of appearance: an Arrow dictionary that only grows.

    Args:
        column: The column of `EVENTS` that it is for. When the numbers of its type run out,
            all further words share the last one.
        words: The first words.
    """

    def __init__(self, column: str, words: Sequence[str] = ()) -> None:
        self._codes = {word: code for code, word in enumerate(words)}
        self._array = arrays.strings(words)
        self._last = (1 << (EVENTS.field(column).type.index_type.bit_width - 1)) - 1

    def code(self, word: str) -> int:
        """The number of a word, a new one if need be."""
        code = self._codes.get(word)
        if code is None:
            if len(self._codes) >= self._last:
                word = _OVERFLOW
            code = self._codes.setdefault(word, len(self._codes))
        return code

    def array(self) -> pa.Array:
        """All words so far."""
        if len(self._array) != len(self._codes):
            self._array = arrays.strings(list(self._codes))
        return self._array


class History:
    """What held when: changes in time order, looked up for many times at once.

    Only the newest changes are kept; rows reach the writer within a flush interval of their
    end, and what started before the kept past gets the oldest value.
    """

    def __init__(self, initial: int) -> None:
        self._times = np.zeros(1, np.int64)
        self._values = np.array([initial], np.int64)

    def extend(self, changes: Sequence[int]) -> None:
        """Adds changes, laid end to end as time, value, time, value."""
        if not changes:
            return
        new = np.array(changes, np.int64)
        times = np.concatenate([self._times, new[::2]])
        values = np.concatenate([self._values, new[1::2]])
        if (times[1:] < times[:-1]).any():
            # Two threads may note their changes a moment out of order.
            order = np.argsort(times, kind="stable")
            times, values = times[order], values[order]
        self._times, self._values = times[-_KEPT_CHANGES:], values[-_KEPT_CHANGES:]

    def at(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The value that held at each time."""
        index = np.searchsorted(self._times, times, side="right") - 1
        values: npt.NDArray[np.int64] = self._values[np.maximum(index, 0)]
        return values


class BatchBuilder:
    """Builds one Arrow batch from what the recorder has gathered since the last one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names = Vocabulary("name")
        self._lanes = Vocabulary("lane", ["main"])
        self._groups = Vocabulary("group")
        self._ops = Vocabulary("op", OPS)
        self._dtypes = Vocabulary("dtype")
        self._fixed = {
            "kind": arrays.strings(KINDS),
            "phase": arrays.strings(PHASES),
            "status": arrays.strings(STATUSES),
        }
        self._steps = History(-1)
        self._phases = History(PHASES.index("other"))
        self._lane_of_thread: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._site_columns = np.empty((0, 3), np.int64)

    def build(self) -> pa.RecordBatch | None:
        """Takes everything out of the recorder.

        Returns:
            A batch of schema `EVENTS`, or None if nothing happened. What cannot be made into
            a batch is counted as dropped.
        """
        recorder = self._recorder
        # Each buffer is cut by its length as read once: other threads append meanwhile, and
        # slicing and deleting are atomic.
        flat = _take(recorder.flat)
        messages = _take(recorder.finished)
        messages += self._newly_open()
        waits = _take(recorder.waits)
        # The changes are taken after the rows: a row whose change is missing would be given
        # the wrong step, a change without rows yet does no harm.
        self._steps.extend(_take(recorder.step_changes))
        self._phases.extend(_take(recorder.phase_changes))
        if not flat and not messages and not waits:
            return None
        try:
            rows = np.array(flat, np.int64).reshape(-1, 4)
            return self._batch(rows, messages, waits)
        except BaseException:  # of memory, for example, there may be too little
            recorder.dropped += len(flat) // 4 + len(messages) + len(waits)
            raise

    def _newly_open(self) -> list[Message]:
        shown = []
        for message in list(self._recorder.open.values()):
            if not message.shown_open:
                message.shown_open = True
                shown.append(message)
        return shown

    def _sites(self) -> npt.NDArray[np.int64]:
        """Kind code, name code and tensor id of every site."""
        known = len(self._site_columns)
        sites = self._recorder.sites
        if len(sites) > known:
            new = [(kind, self._names.code(name), tensor) for kind, name, tensor in sites[known:]]
            self._site_columns = np.concatenate([self._site_columns, np.array(new, np.int64)])
        return self._site_columns

    def _lane(self, ident: int) -> int:
        code = self._lane_of_thread.get(ident)
        if code is None:
            # Streams of a device are numbered from -1 downwards.
            name = f"thread-{len(self._lane_of_thread)}" if ident >= 0 else f"stream-{-1 - ident}"
            code = self._lanes.code(name)
            self._lane_of_thread[ident] = code
        return code

    def _batch(
        self,
        flat: npt.NDArray[np.int64],
        messages: list[Message],
        waits: list[tuple[int, int, int, str, int]],
    ) -> pa.RecordBatch:
        """One batch of the three sorts of rows, in this order."""
        first_message, first_wait = len(flat), len(flat) + len(messages)
        table = np.full((len(_ROW_OF), first_wait + len(waits)), -1, np.int64)
        site = self._sites()[flat[:, 0]] if len(flat) else np.empty((0, 3), np.int64)
        if len(flat):
            table[_FLAT_COLUMNS, :first_message] = (
                flat[:, 1],
                flat[:, 2],
                site[:, 0],
                site[:, 1],
                self._lanes_of(flat[:, 3]),
            )
        if messages:
            rows = np.array([self._message_row(message) for message in messages], np.int64)
            table[_MESSAGE_COLUMNS, first_message:first_wait] = rows.T
        if waits:
            rows = np.array([self._wait_row(*wait) for wait in waits], np.int64)
            table[_WAIT_COLUMNS, first_wait:] = rows.T
        start = table[_ROW_OF["start_ns"]]
        told = slice(first_message, first_wait)  # a message knows its own step and phase
        for name, history in (("step", self._steps), ("phase", self._phases)):
            own = table[_ROW_OF[name], told].copy()
            table[_ROW_OF[name]] = history.at(start)
            table[_ROW_OF[name], told] = own

        lengths = np.zeros(len(start), np.int64)
        of_site = site[:, 2] >= 0
        lengths[:first_message] = of_site
        lengths[told] = [0 if m.tensors is None else len(m.tensors) for m in messages]
        of_messages = [tensor for m in messages if m.tensors is not None for tensor in m.tensors]
        tensors = np.concatenate([site[of_site, 2], np.array(of_messages, np.int64)])
        return pa.RecordBatch.from_arrays(
            [*self._arrow_columns(table), arrays.lists(tensors, lengths, _TENSORS)], schema=EVENTS
        )

    def _lanes_of(self, threads: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The lane of each row's thread: most often there is but one."""
        if (threads == threads[0]).all():
            return np.full(len(threads), self._lane(int(threads[0])), np.int64)
        unique, inverse = np.unique(threads, return_inverse=True)
        return np.array([self._lane(int(t)) for t in unique], np.int64)[inverse]

    def _message_row(self, message: Message) -> tuple[int, ...]:
        """A message's values in the order of `_MESSAGE_COLUMNS`."""
        lane, group = self._codes_of_group(message.group)
        return (
            message.start_ns,
            _or_null(message.end_ns),
            _MESSAGE,
            self._names.code(message.name),
            lane,
            _or_null(message.step),
            message.phase,
            message.id,
            self._ops.code(message.op),
            group,
            _or_null(message.seq),
            _or_null(message.peer),
            _or_null(message.tag),
            _or_null(message.bytes),
            _or_null(message.out_bytes),
            -1 if message.dtype is None else self._dtypes.code(message.dtype),
            message.enqueue_ns,
            STATUSES.index(message.status),
        )

    def _codes_of_group(self, group: str) -> tuple[int, int]:
        return self._lanes.code(f"comm/{group}"), self._groups.code(group)

    def _wait_row(
        self, start: int, end: int, message: int, name: str, thread: int
    ) -> tuple[int, ...]:
        """A wait's values in the order of `_WAIT_COLUMNS`."""
        return start, end, _WAIT, self._names.code(name), self._lane(thread), message

    def _arrow_columns(self, table: npt.NDArray[np.int64]) -> list[pa.Array]:
        words = {
            **self._fixed,
            "name": self._names.array(),
            "lane": self._lanes.array(),
            "group": self._groups.array(),
            "op": self._ops.array(),
            "dtype": self._dtypes.array(),
        }
        columns = arrays.integer_columns(table, _STORED_TYPES)
        return [
            column
            if (own := words.get(name)) is None
            else pa.DictionaryArray.from_arrays(column, own, safe=False)
            for name, column in zip(_ROW_OF, columns, strict=True)
        ]


class WriterThread(threading.Thread):
    """Writes a batch every interval until it is stopped.

    A full or vanished disk ends the writing, never the job: what cannot be written is counted
    as dropped.

    Args:
        recorder: What to write.
        stream: Where to.
        interval_s: The time between two batches.
        on_fault: Is given what goes wrong.
        on_beat: Is called at every interval, on this thread: the job's never touch the disk.
        on_end: Is called after the last write, with the number of rows written.
        watchdog: Looks at the rank at every interval.
    """

    def __init__(
        self,
        recorder: Recorder,
        stream: StreamWriter,
        interval_s: float,
        *,
        on_fault: Callable[[str, Exception], None],
        on_beat: Callable[[], None],
        on_end: Callable[[int], None],
        watchdog: Watchdog,
    ) -> None:
        super().__init__(name="ddltrace-writer", daemon=True)
        self._watchdog = watchdog
        self._recorder = recorder
        self._builder = BatchBuilder(recorder)
        self._stream = stream
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._on_beat = on_beat
        self._on_end = on_end
        self._stop_requested = threading.Event()
        self._writing = threading.RLock()
        self._broken = False
        self.rows = 0
        self.busy_ns = 0

    def run(self) -> None:
        """Writes until stopped, then once more."""
        try:
            due_s = time.monotonic() + self._interval_s
            while not self._stop_requested.wait(max(0.0, due_s - time.monotonic())):
                self._flush()
                # The time that a write takes is not added to the period.
                due_s = max(due_s + self._interval_s, time.monotonic())
            self._flush()
            self._on_end(self.rows)
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._on_fault("writer", error)

    def stop(self, timeout_s: float) -> bool:
        """Asks for the last write and waits for it.

        Returns:
            Whether the thread has ended.
        """
        self._stop_requested.set()
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

    def _flush(self) -> None:
        with self._writing:
            self._flush_now()

    def _beat(self) -> None:
        try:
            self._on_beat()
        except Exception as error:  # noqa: BLE001 - the rows are to be written
            self._on_fault("save", error)

    def _flush_now(self) -> None:
        before = time.thread_time_ns()
        for collect in self._recorder.collectors:
            try:
                collect()
            except Exception as error:  # noqa: BLE001 - what has ended shows as open
                self._on_fault("collect", error)
        try:
            try:
                batch = self._builder.build()
            finally:
                # Before the rows: a reader of them finds their groups and tensors.
                self._beat()
            self._watchdog.tick(active=batch is not None or self._recorder.paused)
            if batch is None:
                return
            if self._broken:
                self._recorder.dropped += batch.num_rows
                return
            try:
                self._stream.write(batch)
                self.rows += batch.num_rows
            except (OSError, pa.ArrowException) as error:
                self._broken = True
                self._stream.cut()
                self._recorder.dropped += batch.num_rows
                self._on_fault("write", error)
        except Exception as error:  # noqa: BLE001 - the job goes on, the fault is recorded
            self._on_fault("build", error)
        finally:
            self.busy_ns += time.thread_time_ns() - before


def _take(buffer: list[Any]) -> list[Any]:
    length = len(buffer)
    taken = buffer[:length]
    del buffer[:length]
    return taken


def _or_null(value: int | None) -> int:
    return -1 if value is None else value
