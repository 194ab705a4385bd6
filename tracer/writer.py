"""The background thread that turns the recorder's buffers into Arrow batches on disk."""

from __future__ import annotations

import bisect
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
        self._times: list[int] = [0]
        self._values: list[int] = [initial]

    def extend(self, changes: Sequence[int]) -> None:
        """Adds changes, laid end to end as time, value, time, value."""
        # Two threads may note their changes a moment out of order.
        for time_ns, value in zip(changes[::2], changes[1::2], strict=True):
            if time_ns >= self._times[-1]:
                self._times.append(time_ns)
                self._values.append(value)
            else:
                at = bisect.bisect_right(self._times, time_ns)
                self._times.insert(at, time_ns)
                self._values.insert(at, value)
        if len(self._times) > 2 * _KEPT_CHANGES:
            del self._times[:-_KEPT_CHANGES]
            del self._values[:-_KEPT_CHANGES]

    def at(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The value that held at each time."""
        index = np.searchsorted(np.array(self._times, np.int64), times, side="right") - 1
        values: npt.NDArray[np.int64] = np.array(self._values, np.int64)[np.maximum(index, 0)]
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
            A batch of schema `EVENTS`, or None if nothing happened.
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
        rows = np.array(flat, np.int64).reshape(-1, 4)
        return self._batch(rows, messages, waits)

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
        num_flat, num_messages, num_waits = len(flat), len(messages), len(waits)
        site = self._sites()[flat[:, 0]] if num_flat else np.empty((0, 3), np.int64)
        threads, inverse = np.unique(flat[:, 3], return_inverse=True)
        flat_lanes = np.array([self._lane(int(t)) for t in threads], np.int64)[inverse]

        def column(
            flat_part: npt.NDArray[np.int64] | int,
            message_part: Sequence[int | None] | int,
            wait_part: Sequence[int] | int = -1,
        ) -> npt.NDArray[np.int64]:
            """One column over all rows; -1 stands for null."""
            out = np.full(num_flat + num_messages + num_waits, -1, np.int64)
            out[:num_flat] = flat_part
            if isinstance(message_part, int):
                out[num_flat : num_flat + num_messages] = message_part
            else:
                out[num_flat : num_flat + num_messages] = [
                    -1 if v is None else v for v in message_part
                ]
            out[num_flat + num_messages :] = wait_part
            return out

        def coded(word: Callable[[Message], str | None], words: Vocabulary) -> list[int | None]:
            return [None if (w := word(m)) is None else words.code(w) for m in messages]

        start = column(flat[:, 1], [m.start_ns for m in messages], [w[0] for w in waits])
        step = self._steps.at(start)
        step[num_flat : num_flat + num_messages] = [
            -1 if m.step is None else m.step for m in messages
        ]
        phase = self._phases.at(start)
        phase[num_flat : num_flat + num_messages] = [m.phase for m in messages]
        tensors = [[t] if t >= 0 else None for t in site[:, 2].tolist()]
        tensors += [m.tensors for m in messages]
        tensors += [None] * num_waits

        columns: dict[str, Any] = {
            "start_ns": start,
            "end_ns": column(flat[:, 2], [m.end_ns for m in messages], [w[1] for w in waits]),
            "kind": column(site[:, 0], _MESSAGE, _WAIT),
            "name": column(
                site[:, 1],
                coded(lambda m: m.name, self._names),
                [self._names.code(w[3]) for w in waits],
            ),
            "lane": column(
                flat_lanes,
                coded(lambda m: f"comm/{m.group}", self._lanes),
                [self._lane(w[4]) for w in waits],
            ),
            "step": step,
            "phase": phase,
            "id": column(-1, [m.id for m in messages]),
            "parent": column(-1, -1, [w[2] for w in waits]),
            "op": column(-1, coded(lambda m: m.op, self._ops)),
            "group": column(-1, coded(lambda m: m.group, self._groups)),
            "seq": column(-1, [m.seq for m in messages]),
            "peer": column(-1, [m.peer for m in messages]),
            "tag": column(-1, [m.tag for m in messages]),
            "bytes": column(-1, [m.bytes for m in messages]),
            "out_bytes": column(-1, [m.out_bytes for m in messages]),
            "wire_bytes": column(-1, -1),
            "dtype": column(-1, coded(lambda m: m.dtype, self._dtypes)),
            "enqueue_ns": column(-1, [m.enqueue_ns for m in messages]),
            "status": column(-1, [STATUSES.index(m.status) for m in messages]),
        }
        words = {
            **self._fixed,
            "name": self._names.array(),
            "lane": self._lanes.array(),
            "group": self._groups.array(),
            "op": self._ops.array(),
            "dtype": self._dtypes.array(),
        }
        built = [
            arrays.lists(tensors, field.type)
            if field.name == "tensors"
            else _arrow(columns[field.name], field.type, words.get(field.name))
            for field in EVENTS
        ]
        return pa.RecordBatch.from_arrays(built, schema=EVENTS)


class WriterThread(threading.Thread):
    """Writes a batch every interval until it is stopped.

    A full or vanished disk ends the writing, never the job: what cannot be written is counted
    as dropped.
    """

    def __init__(
        self,
        recorder: Recorder,
        stream: StreamWriter,
        interval_s: float,
        on_fault: Callable[[str, Exception], None],
        watchdog: Watchdog,
    ) -> None:
        super().__init__(name="ddltrace-writer", daemon=True)
        self._watchdog = watchdog
        self._recorder = recorder
        self._builder = BatchBuilder(recorder)
        self._stream = stream
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._stop_requested = threading.Event()
        self._writing = threading.RLock()
        self._broken = False
        self.rows = 0
        self.busy_ns = 0

    def run(self) -> None:
        """Writes until stopped, then once more."""
        while not self._stop_requested.wait(self._interval_s):
            self._flush()
        self._flush()

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

    def _flush_now(self) -> None:
        before = time.thread_time_ns()
        try:
            batch = self._builder.build()
            self._watchdog.tick(active=batch is not None)
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


def _arrow(values: npt.NDArray[np.int64], type_: pa.DataType, words: pa.Array | None) -> pa.Array:
    """An Arrow column from integers in which -1 stands for null."""
    index_type = type_.index_type if words is not None else type_
    column = arrays.integers(values, index_type, values >= 0)
    if words is None:
        return column
    return pa.DictionaryArray.from_arrays(column, words, safe=False)
