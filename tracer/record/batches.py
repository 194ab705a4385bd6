"""Converts recorded events to Arrow batches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ddltrace.tracer.record.recorder import (
    BY_TIME,
    FLAT_CELLS,
    KIND_CODE,
    REPEAT_FIELDS,
    SITE_NUMBERS,
    WAIT_CELLS,
    Message,
    Site,
    Taken,
)
from ddltrace.tracer.trace import arrow_arrays
from ddltrace.tracer.trace.arrow_arrays import Integers
from ddltrace.tracer.trace.schema import (
    CLOCKS,
    EVENTS,
    KINDS,
    MESSAGE_FIELDS,
    OPS,
    OWN_FIELDS,
    PHASES,
    SEAMS,
    SHARED_FIELDS,
    STATUSES,
)

_KEPT_CHANGES: Final = 4096
_OVERFLOW: Final = "(too many names)"
_MESSAGE: Final = KIND_CODE["message"]

_ALL_TO_ALL: Final = OPS.index("all_to_all")
_OPEN: Final = STATUSES.index("open")

# A batch is built as one table of integers with a row for each column but the two last, which hold
# lists; -1 is null.
_TENSORS: Final = EVENTS.field("tensors").type
_SPLITS: Final = EVENTS.field("split_bytes").type
_INTEGER_FIELDS: Final = [field for field in EVENTS if not pa.types.is_list(field.type)]
_ROW_OF: Final = {field.name: row for row, field in enumerate(_INTEGER_FIELDS)}
_STORED_TYPES: Final = [
    field.type.index_type if pa.types.is_dictionary(field.type) else field.type
    for field in _INTEGER_FIELDS
]


_FLAT_COLUMNS: Final = [
    _ROW_OF[name] for name in ("start_ns", "end_ns", "kind", "name", "lane", *SITE_NUMBERS)
]
_REPEAT_COLUMNS: Final = [_ROW_OF[name] for name in OWN_FIELDS]

# Tensors are lists, which are stored beside the table.
_MESSAGE_NAMES: Final = [name for name in MESSAGE_FIELDS if name != "tensors"]
_PATTERN_NAMES: Final = [name for name in SHARED_FIELDS if name != "tensors"]
_PATTERN_COLUMNS: Final = [_ROW_OF[name] for name in (*_PATTERN_NAMES, "kind", "lane", "phase")]
_values_of_message: Final = attrgetter(*_MESSAGE_NAMES)
_values_of_pattern: Final = attrgetter(*_PATTERN_NAMES)

_FIRST_WORDS: Final = {
    "kind": KINDS,
    "lane": ("main",),
    "phase": PHASES,
    "op": OPS,
    "status": STATUSES,
    "clock": CLOCKS,
    "seam": SEAMS,
}

_SITE_FIELDS: Final = ("kind", "name", "tensor", *SITE_NUMBERS)


class Vocabulary:
    """Strings numbered in order of appearance: an Arrow dictionary that only grows.

    Args:
        column: The column of `EVENTS` that uses the strings. If there are more strings than its
            type has codes, all further strings share the last code.
        words: The initial strings.
    """

    def __init__(self, column: str, words: Sequence[str] = ()) -> None:
        self._codes = {word: code for code, word in enumerate(words)}
        self._array = arrow_arrays.strings(words)
        self._last = (1 << (EVENTS.field(column).type.index_type.bit_width - 1)) - 1

    def code(self, word: str) -> int:
        """The code of a string; a new string gets the next code."""
        code = self._codes.get(word)
        if code is None:
            if len(self._codes) >= self._last:
                word = _OVERFLOW
            code = self._codes.setdefault(word, len(self._codes))
        return code

    def array(self) -> pa.Array:
        """All strings so far."""
        if len(self._array) != len(self._codes):
            self._array = arrow_arrays.strings(list(self._codes))
        return self._array


class History:
    """A value over time: stores its changes in order and looks up the value at many times at once.

    Only the latest changes are kept. Rows reach the writer within a flush interval of their end; a
    row that started before the oldest kept change gets the oldest value.
    """

    def __init__(self, initial: int) -> None:
        self._times = np.zeros(1, np.int64)
        self._values = np.array([initial], np.int64)

    def extend(self, changes: Sequence[int]) -> None:
        """Adds changes: a flat list of time, value, time, value."""
        if not changes:
            return
        new = np.array(changes, np.int64)
        times = np.concatenate([self._times[-_KEPT_CHANGES:], new[::2]])
        values = np.concatenate([self._values[-_KEPT_CHANGES:], new[1::2]])
        if (times[1:] < times[:-1]).any():
            # Changes of two threads may arrive slightly out of order.
            order = np.argsort(times, kind="stable")
            times, values = times[order], values[order]
        self._times, self._values = times, values

    def at(self, times: Integers) -> Integers:
        """The value at each time."""
        index = np.searchsorted(self._times, times, side="right") - 1
        values: Integers = self._values[np.maximum(index, 0)]
        return values


class BatchBuilder:
    """Builds Arrow batches from the events taken out of a recorder.

    Args:
        sites: The recorder's sites.
        patterns: The recorder's patterns.
        splits: What the recorder's all-to-alls send to each member, by id; written ones are
            removed.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        patterns: Sequence[Message] = (),
        splits: dict[int, list[int]] | None = None,
    ) -> None:
        self._sites = sites
        self._splits = {} if splits is None else splits
        self._patterns = patterns
        self._words = {
            field.name: Vocabulary(field.name, _FIRST_WORDS.get(field.name, ()))
            for field in _INTEGER_FIELDS
            if pa.types.is_dictionary(field.type)
        }
        self._names, self._lanes = self._words["name"], self._words["lane"]
        self._steps = History(-1)
        self._phases = History(PHASES.index("other"))
        self._threads = {threading.main_thread().ident or 0: "main"}
        self._lane_of_thread = {i: self._lanes.code(name) for i, name in self._threads.items()}
        self._site_columns = np.empty((0, len(_SITE_FIELDS)), np.int64)
        self._pattern_columns = np.empty((0, len(_PATTERN_COLUMNS) + 1), np.int64)

    def build(self, taken: Taken) -> pa.RecordBatch | None:
        """Builds a batch.

        Args:
            taken: The events recorded since the last batch.

        Returns:
            A batch of schema `EVENTS`; None without events.
        """
        self._steps.extend(taken.step_changes)
        self._phases.extend(taken.phase_changes)
        messages = [(message, _values_of_message(message)) for message in taken.ended]
        messages += _still_open(taken.open)
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
        """The values that all messages of a pattern share, for every pattern, in the order of the
        columns."""
        new = self._patterns[len(self._pattern_columns) :]
        if new:
            values = zip(*map(_values_of_pattern, new), strict=True)
            columns = [self._codes(*column) for column in zip(_PATTERN_NAMES, values, strict=True)]
            columns.append(np.full(len(new), _MESSAGE))
            columns.append(self._lanes_of_groups([like.group for like in new]))
            columns.append(np.full(len(new), BY_TIME))
            columns.append(np.array([len(like.tensors or ()) for like in new]))
            rows = np.stack(columns, axis=1)
            self._pattern_columns = np.concatenate([self._pattern_columns, rows])
        return self._pattern_columns

    def _codes(self, column: str, values: Sequence[Any]) -> Integers:
        """A column's values as integers: strings by their code, -1 for None."""
        words = self._words.get(column)
        if words is None or column == "phase":  # the value is an integer already
            return np.array([-1 if value is None else value for value in values], np.int64)
        return np.array([-1 if value is None else words.code(value) for value in values], np.int64)

    def _lanes_of_groups(self, groups: Sequence[str]) -> Integers:
        return np.array([self._lanes.code(f"comm/{group}") for group in groups], np.int64)

    def _lane(self, ident: int) -> int:
        code = self._lane_of_thread.get(ident)
        if code is None:
            # Streams of a device have the numbers -1, -2, ...
            name = f"thread-{len(self._threads)}" if ident >= 0 else f"stream-{-1 - ident}"
            self._threads[ident] = name
            code = self._lane_of_thread[ident] = self._lanes.code(name)
        return code

    def _batch(
        self,
        flat: Integers,
        messages: list[tuple[Message, tuple[Any, ...]]],
        repeats: Integers,
        waits: Integers,
    ) -> pa.RecordBatch:
        """Builds one batch from the four kinds of rows, in this order."""
        first_message = len(flat)
        first_repeat = first_message + len(messages)
        first_wait = first_repeat + len(repeats)
        table = np.full((len(_ROW_OF), first_wait + len(waits)), -1, np.int64)
        lengths = np.zeros(table.shape[1], np.int64)
        columns, about = self._columns_of_flat(flat)
        table[_FLAT_COLUMNS, :first_message] = columns
        if messages:
            values = zip(*(row for _, row in messages), strict=True)
            for name, column in zip(_MESSAGE_NAMES, values, strict=True):
                table[_ROW_OF[name], first_message:first_repeat] = self._codes(name, column)
            table[_ROW_OF["kind"], first_message:first_repeat] = _MESSAGE
            groups = [message.group for message, _ in messages]
            table[_ROW_OF["lane"], first_message:first_repeat] = self._lanes_of_groups(groups)
        if len(repeats):
            *common, counts = self._columns_of_patterns()[repeats[:, 0]].T
            table[_REPEAT_COLUMNS, first_repeat:first_wait] = repeats.T[1:]
            table[_PATTERN_COLUMNS, first_repeat:first_wait] = common
            lengths[first_repeat:first_wait] = counts
        columns, _ = self._columns_of_flat(waits)
        table[_FLAT_COLUMNS, first_wait:] = columns
        table[_ROW_OF["parent"], first_wait:] = waits[:, FLAT_CELLS]
        start = table[_ROW_OF["start_ns"]]
        all_messages = slice(first_message, first_wait)  # a message may have its own step and phase
        by_time = table[_ROW_OF["phase"], all_messages] == BY_TIME
        enqueued = table[_ROW_OF["enqueue_ns"], all_messages]
        for name, history in (("step", self._steps), ("phase", self._phases)):
            own = table[_ROW_OF[name], all_messages].copy()
            table[_ROW_OF[name]] = history.at(start)
            table[_ROW_OF[name], all_messages] = np.where(by_time, history.at(enqueued), own)

        lengths[:first_message] = about >= 0
        carried = [message.tensors or () for message, _ in messages]
        lengths[first_message:first_repeat] = [len(tensors) for tensors in carried]
        carrying = repeats[lengths[first_repeat:first_wait] > 0, 0]
        carried += [self._patterns[number].tensors or () for number in carrying.tolist()]
        of_messages = [tensor for tensors in carried for tensor in tensors]
        tensors = np.concatenate([about[about >= 0], np.array(of_messages, np.int64)])
        return pa.RecordBatch.from_arrays(
            [
                *self._arrow_columns(table),
                arrow_arrays.lists(tensors, lengths, _TENSORS),
                self._split_bytes(table),
            ],
            schema=EVENTS,
        )

    def _split_bytes(self, table: Integers) -> pa.Array:
        """The column of what all-to-alls send to each member."""
        lengths = np.zeros(table.shape[1], np.int64)
        sizes: list[int] = []
        if self._splits:
            for row in np.flatnonzero(table[_ROW_OF["op"]] == _ALL_TO_ALL).tolist():
                number = int(table[_ROW_OF["id"], row])
                split_bytes = self._splits.get(number, ())
                if table[_ROW_OF["status"], row] != _OPEN:
                    self._splits.pop(number, None)
                sizes += split_bytes
                lengths[row] = len(split_bytes)
        return arrow_arrays.lists(np.array(sizes, np.int64), lengths, _SPLITS)

    def _columns_of_flat(self, rows: Integers) -> tuple[Integers, Integers]:
        """Reads rows of `Recorder.flat`, or rows that begin with the same fields.

        Returns:
            Their `_FLAT_COLUMNS`, and the id of each row's parameter, -1 for none.
        """
        if len(rows) == 0:
            return np.empty((len(_FLAT_COLUMNS), 0), np.int64), np.empty(0, np.int64)
        kind, name, about, *numbers = self._columns_of_sites()[rows[:, 0]].T
        lane = self._lanes_of(rows[:, 3])
        return np.stack([rows[:, 1], rows[:, 2], kind, name, lane, *numbers]), about

    def _lanes_of(self, threads: Integers) -> Integers:
        """The lane of each row's thread; usually all rows are of one thread."""
        if (threads == threads[0]).all():
            return np.full(len(threads), self._lane(int(threads[0])), np.int64)
        unique, inverse = np.unique(threads, return_inverse=True)
        return np.array([self._lane(int(t)) for t in unique], np.int64)[inverse]

    def _arrow_columns(self, table: Integers) -> list[pa.Array]:
        columns = arrow_arrays.integer_columns(table, _STORED_TYPES)
        return [
            column
            if (words := self._words.get(name)) is None
            else pa.DictionaryArray.from_arrays(column, words.array(), safe=False)
            for name, column in zip(_ROW_OF, columns, strict=True)
        ]


def _still_open(messages: Iterable[Message]) -> list[tuple[Message, tuple[Any, ...]]]:
    """Returns messages that are open, each with its values.

    A message that was open when it was taken and has ended since is left out, because its completed
    row follows. It may end at any moment, so its state is read after its values.

    Args:
        messages: Messages that were open when they were taken.
    """
    rows = [(message, _values_of_message(message)) for message in messages]
    return [(message, row) for message, row in rows if message.end_ns is None]
