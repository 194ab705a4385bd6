"""From what the recorder has gathered to Arrow batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from ddltrace.tracer.record.recorder import (
    BY_TIME,
    FLAT_CELLS,
    KIND_CODE,
    REPEAT_FIELDS,
    WAIT_CELLS,
    Message,
    Site,
    Taken,
    or_null,
)
from ddltrace.tracer.trace import arrow_arrays
from ddltrace.tracer.trace.arrow_arrays import Integers
from ddltrace.tracer.trace.schema import EVENTS, KINDS, OPS, PHASES, STATUSES

_KEPT_CHANGES: Final = 4096
_OVERFLOW: Final = "(too many names)"
_MESSAGE: Final = KIND_CODE["message"]

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


_FLAT_COLUMNS: Final = _rows_of("start_ns end_ns kind name lane bytes out_bytes")
_MESSAGE_COLUMNS: Final = _rows_of(
    "start_ns end_ns kind name lane step phase id op group seq peer tag bytes out_bytes dtype "
    "enqueue_ns status"
)
_REPEAT_COLUMNS: Final = [_ROW_OF[name] for name in REPEAT_FIELDS[1:]]
_PATTERN_COLUMNS: Final = _rows_of("kind name lane phase op group tag dtype")

_SITE_FIELDS: Final = ("kind", "name", "tensor", "bytes", "out_bytes")


class Vocabulary:
    """Strings numbered in order of appearance: an Arrow dictionary that only grows.

    Args:
        column: The column of `EVENTS` that it is for. When the numbers of its type run out,
            all further words share the last one.
        words: The first words.
    """

    def __init__(self, column: str, words: Sequence[str] = ()) -> None:
        self._codes = {word: code for code, word in enumerate(words)}
        self._array = arrow_arrays.strings(words)
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
            self._array = arrow_arrays.strings(list(self._codes))
        return self._array


class History:
    """What held when: changes in time order, looked up for many times at once.

    Kept are the changes that came last and the newest of those before; rows reach the writer
    within a flush interval of their end, and what started earlier gets the oldest value kept.
    """

    def __init__(self, initial: int) -> None:
        self._times = np.zeros(1, np.int64)
        self._values = np.array([initial], np.int64)

    def extend(self, changes: Sequence[int]) -> None:
        """Adds changes, laid end to end as time, value, time, value."""
        if not changes:
            return
        new = np.array(changes, np.int64)
        times = np.concatenate([self._times[-_KEPT_CHANGES:], new[::2]])
        values = np.concatenate([self._values[-_KEPT_CHANGES:], new[1::2]])
        if (times[1:] < times[:-1]).any():
            # Two threads may note their changes a moment out of order.
            order = np.argsort(times, kind="stable")
            times, values = times[order], values[order]
        self._times, self._values = times, values

    def at(self, times: Integers) -> Integers:
        """The value that held at each time."""
        index = np.searchsorted(self._times, times, side="right") - 1
        values: Integers = self._values[np.maximum(index, 0)]
        return values


class BatchBuilder:
    """Builds Arrow batches from what was taken out of a recorder.

    Args:
        sites: The recorder's.
        patterns: The recorder's.
    """

    def __init__(self, sites: Sequence[Site], patterns: Sequence[Message] = ()) -> None:
        self._sites = sites
        self._patterns = patterns
        self._names = Vocabulary("name")
        self._lanes = Vocabulary("lane", ["main"])
        self._groups = Vocabulary("group")
        self._ops = Vocabulary("op", OPS)
        self._dtypes = Vocabulary("dtype")
        self._fixed = {
            "kind": arrow_arrays.strings(KINDS),
            "phase": arrow_arrays.strings(PHASES),
            "status": arrow_arrays.strings(STATUSES),
        }
        self._steps = History(-1)
        self._phases = History(PHASES.index("other"))
        self._threads = {threading.main_thread().ident or 0: "main"}
        self._lane_of_thread = {i: self._lanes.code(name) for i, name in self._threads.items()}
        self._site_columns = np.empty((0, len(_SITE_FIELDS)), np.int64)
        self._pattern_columns = np.empty((0, len(_PATTERN_COLUMNS) + 1), np.int64)

    def build(self, taken: Taken) -> pa.RecordBatch | None:
        """Makes a batch.

        Args:
            taken: What was recorded since the last one.

        Returns:
            A batch of schema `EVENTS`, or None if nothing happened.
        """
        self._steps.extend(taken.step_changes)
        self._phases.extend(taken.phase_changes)
        messages = [(message, self._message_row(message)) for message in taken.ended]
        messages += _still_open(taken.open, self._message_row)
        if not taken.flat and not messages and not taken.waits and not taken.repeats:
            return None
        rows = np.frombuffer(taken.flat, np.int64).reshape(-1, FLAT_CELLS)
        repeats = np.frombuffer(taken.repeats, np.int64).reshape(-1, len(REPEAT_FIELDS))
        waits = np.frombuffer(taken.waits, np.int64).reshape(-1, WAIT_CELLS)
        return self._batch(rows, messages, repeats, waits)

    def _columns_of_sites(self) -> Integers:
        """The `_SITE_FIELDS` of every site."""
        known, sites = len(self._site_columns), self._sites
        if len(sites) > known:
            new = [(kind, self._names.code(name), *rest) for kind, name, *rest in sites[known:]]
            self._site_columns = np.concatenate([self._site_columns, np.array(new, np.int64)])
        return self._site_columns

    def _columns_of_patterns(self) -> Integers:
        """Of every pattern what its messages have in common, in the order of the columns."""
        new = [self._pattern_row(like) for like in self._patterns[len(self._pattern_columns) :]]
        if new:
            self._pattern_columns = np.concatenate([self._pattern_columns, np.array(new, np.int64)])
        return self._pattern_columns

    def _pattern_row(self, like: Message) -> tuple[int, ...]:
        """What messages have in common: their `_PATTERN_COLUMNS`; how many tensors they carry."""
        lane, group = self._codes_of_group(like.group)
        name, op = self._names.code(like.name), self._ops.code(like.op)
        own = or_null(like.tag), self._code_of_dtype(like)
        return _MESSAGE, name, lane, BY_TIME, op, group, *own, len(like.tensors or ())

    def _lane(self, ident: int) -> int:
        code = self._lane_of_thread.get(ident)
        if code is None:
            # Streams of a device are numbered from -1 downwards.
            name = f"thread-{len(self._threads)}" if ident >= 0 else f"stream-{-1 - ident}"
            self._threads[ident] = name
            code = self._lane_of_thread[ident] = self._lanes.code(name)
        return code

    def _batch(
        self,
        flat: Integers,
        messages: list[tuple[Message, tuple[int, ...]]],
        repeats: Integers,
        waits: Integers,
    ) -> pa.RecordBatch:
        """One batch of the four sorts of rows, in this order."""
        first_message = len(flat)
        first_repeat = first_message + len(messages)
        first_wait = first_repeat + len(repeats)
        table = np.full((len(_ROW_OF), first_wait + len(waits)), -1, np.int64)
        lengths = np.zeros(table.shape[1], np.int64)
        columns, about = self._columns_of_flat(flat)
        table[_FLAT_COLUMNS, :first_message] = columns
        if messages:
            rows = np.array([row for _, row in messages], np.int64)
            table[_MESSAGE_COLUMNS, first_message:first_repeat] = rows.T
        if len(repeats):
            *common, counts = self._columns_of_patterns()[repeats[:, 0]].T
            table[_REPEAT_COLUMNS, first_repeat:first_wait] = repeats.T[1:]
            table[_PATTERN_COLUMNS, first_repeat:first_wait] = common
            lengths[first_repeat:first_wait] = counts
        columns, _ = self._columns_of_flat(waits)
        table[_FLAT_COLUMNS, first_wait:] = columns
        table[_ROW_OF["parent"], first_wait:] = waits[:, FLAT_CELLS]
        start = table[_ROW_OF["start_ns"]]
        told = slice(first_message, first_wait)  # a message may know its own step and phase
        by_time = table[_ROW_OF["phase"], told] == BY_TIME
        enqueued = table[_ROW_OF["enqueue_ns"], told]
        for name, history in (("step", self._steps), ("phase", self._phases)):
            own = table[_ROW_OF[name], told].copy()
            table[_ROW_OF[name]] = history.at(start)
            table[_ROW_OF[name], told] = np.where(by_time, history.at(enqueued), own)

        lengths[:first_message] = about >= 0
        carried = [message.tensors or () for message, _ in messages]
        lengths[first_message:first_repeat] = [len(tensors) for tensors in carried]
        carrying = repeats[lengths[first_repeat:first_wait] > 0, 0]
        carried += [self._patterns[number].tensors or () for number in carrying.tolist()]
        of_messages = [tensor for tensors in carried for tensor in tensors]
        tensors = np.concatenate([about[about >= 0], np.array(of_messages, np.int64)])
        return pa.RecordBatch.from_arrays(
            [*self._arrow_columns(table), arrow_arrays.lists(tensors, lengths, _TENSORS)],
            schema=EVENTS,
        )

    def _columns_of_flat(self, rows: Integers) -> tuple[Integers, Integers]:
        """What is in rows of `Recorder.flat`, or rows that begin like them.

        Returns:
            Their `_FLAT_COLUMNS`; and the parameter that each is about, -1 for none.
        """
        if len(rows) == 0:
            return np.empty((len(_FLAT_COLUMNS), 0), np.int64), np.empty(0, np.int64)
        kind, name, about, *sizes = self._columns_of_sites()[rows[:, 0]].T
        lane = self._lanes_of(rows[:, 3])
        return np.stack([rows[:, 1], rows[:, 2], kind, name, lane, *sizes]), about

    def _lanes_of(self, threads: Integers) -> Integers:
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
            or_null(message.end_ns),
            _MESSAGE,
            self._names.code(message.name),
            lane,
            or_null(message.step),
            message.phase,
            message.id,
            self._ops.code(message.op),
            group,
            or_null(message.seq),
            or_null(message.peer),
            or_null(message.tag),
            or_null(message.bytes),
            or_null(message.out_bytes),
            self._code_of_dtype(message),
            message.enqueue_ns,
            STATUSES.index(message.status),
        )

    def _codes_of_group(self, group: str) -> tuple[int, int]:
        return self._lanes.code(f"comm/{group}"), self._groups.code(group)

    def _code_of_dtype(self, message: Message) -> int:
        return -1 if message.dtype is None else self._dtypes.code(message.dtype)

    def _arrow_columns(self, table: Integers) -> list[pa.Array]:
        words = {
            **self._fixed,
            "name": self._names.array(),
            "lane": self._lanes.array(),
            "group": self._groups.array(),
            "op": self._ops.array(),
            "dtype": self._dtypes.array(),
        }
        columns = arrow_arrays.integer_columns(table, _STORED_TYPES)
        return [
            column
            if (own := words.get(name)) is None
            else pa.DictionaryArray.from_arrays(column, own, safe=False)
            for name, column in zip(_ROW_OF, columns, strict=True)
        ]


def _still_open(
    messages: Iterable[Message], row_of: Callable[[Message], tuple[int, ...]]
) -> list[tuple[Message, tuple[int, ...]]]:
    """Messages that are open with a row of each that says so.

    One that was open when it was taken and has ended since comes as ended: with a second row here
    it would be two. It may end at any moment, so it is asked after its row was made.

    Args:
        messages: Some that were open.
        row_of: Makes the row.
    """
    rows = [(message, row_of(message)) for message in messages]
    return [(message, row) for message, row in rows if message.end_ns is None]
