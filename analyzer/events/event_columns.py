"""A rank's events as numpy columns: decoded once, on demand.

Strings become integer codes: strings with a fixed vocabulary (kinds, phases) get the codes of the
schema, others are indices into a list of strings per column. Null becomes a negative number, which
is never a valid value of these columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.tracer.trace.schema import KINDS, PHASES

NULL: Final = -1
NULL_NS: Final = np.iinfo(np.int64).min
"""Stands for a time that is null."""

_LATEST_NS: Final = 1 << 61
"""Times beyond 73 years of uptime are damage; below, sums and differences cannot overflow."""

_ROOM: Final = 1 << 10

KIND: Final = {name: code for code, name in enumerate(KINDS)}
PHASE: Final = {name: code for code, name in enumerate(PHASES)}

IntArray = npt.NDArray[Any]
"""Columns: integers, 64 bits unless the schema has fewer."""
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
TableT = TypeVar("TableT", bound="ColumnTable")


class Columns:
    """Numpy views of one rank's events.

    Rows whose times cannot be real are left out; intervals that end before they start (a
    clock that ran backwards) are instants at their start.

    Attributes:
        damaged: Rows left out.
        backwards: Rows that ended before they started.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table, self.damaged = _plausible(table)
        self.backwards = 0

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @cached_property
    def start(self) -> IntArray:
        """Start of every event, nanoseconds."""
        return self.ints("start_ns", null=NULL_NS)

    @cached_property
    def end(self) -> IntArray:
        """End of every event, nanoseconds; `NULL_NS` where it is not known."""
        end = self.ints("end_ns", null=NULL_NS)
        wrong = (end < self.start) & (end != NULL_NS)
        self.backwards = int(wrong.sum())
        return np.where(wrong, self.start, end) if self.backwards else end

    @cached_property
    def unfinished(self) -> BoolArray:
        """Rows that had not ended when last observed; the end of completed rows may be unknown."""
        codes, values = self.codes("status")
        done = np.array([*(value == "ok" for value in values), False])[codes]
        return np.asarray((self.end == NULL_NS) & ~done)

    @cached_property
    def failed(self) -> BoolArray:
        """Rows that ended with an error."""
        codes, values = self.codes("status")
        return np.array([*(value == "failed" for value in values), False])[codes]

    @cached_property
    def kind(self) -> IntArray:
        """Code of every event's kind in `KIND`; negative for kinds of another version."""
        return self._fixed("kind", KIND)

    @cached_property
    def phase(self) -> IntArray:
        """Code of every event's phase in `PHASE`."""
        return self._fixed("phase", PHASE)

    @cached_property
    def step(self) -> IntArray:
        """Number of the step in whose window every event starts."""
        return self.ints("step")

    @cached_property
    def name(self) -> IntArray:
        """Index of every event's name in `names`."""
        return self.codes("name")[0]

    @cached_property
    def names(self) -> list[str]:
        """The names that occur."""
        return self.codes("name")[1]

    @cached_property
    def lane(self) -> IntArray:
        """Index of every event's lane in `lanes`."""
        return self.codes("lane")[0]

    @cached_property
    def lanes(self) -> list[str]:
        """The lanes that occur."""
        return self.codes("lane")[1]

    def rows(self, *kinds: str) -> IntArray:
        """Rows of the given kinds, in the order of recording."""
        mask = self.kind == KIND[kinds[0]]
        for kind in kinds[1:]:
            mask |= self.kind == KIND[kind]
        return np.flatnonzero(mask)

    def table(self, rows: IntArray) -> pa.Table:
        """Some rows as a table of their own."""
        return self._table.take(pa.array(rows))

    def ints(self, name: str, rows: IntArray | None = None, null: int = NULL) -> IntArray:
        """An integer column, optionally of some rows only."""
        return numbers_of(self._column(name, rows), null)

    def codes(self, name: str, rows: IntArray | None = None) -> tuple[IntArray, list[str]]:
        """A column of strings as codes and the strings that they index."""
        column = self._column(name, rows)
        values = column.dictionary.to_pylist()
        return numbers_of(column.indices, NULL), [value or "" for value in values]

    def lists(self, name: str, rows: IntArray) -> tuple[IntArray, IntArray]:
        """A column of lists of some rows: the length of each, and all items in order."""
        column = self._column(name, rows)
        lengths = numbers_of(pc.list_value_length(column), 0)
        return lengths, numbers_of(pc.list_flatten(column), NULL)

    def _fixed(self, name: str, vocabulary: dict[str, int]) -> IntArray:
        codes, values = self.codes(name)
        meaning = np.array([*(vocabulary.get(value, NULL) for value in values), NULL])
        return np.asarray(meaning[codes], dtype=np.int8)

    def _column(self, name: str, rows: IntArray | None) -> Any:
        chunked = self._table[name]
        # Combining copies, even a single chunk.
        column = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
        return column if rows is None else column.take(pa.array(rows))


class ColumnTable:
    """Columns of equal length: a subclass is a dataclass.

    Attributes that are not arrays belong to the table, not to its rows.
    """

    def __len__(self) -> int:
        return next(len(value) for value in vars(self).values() if isinstance(value, np.ndarray))

    def columns(self) -> dict[str, IntArray]:
        """The columns by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def keep(self: TableT, rows: IntArray | slice) -> TableT:
        """Some rows, in the given order."""
        columns: dict[str, Any] = {name: each[rows] for name, each in self.columns().items()}
        return replace(self, **columns)  # type: ignore[type-var]  # a subclass is a dataclass

    @staticmethod
    def joined(parts: Sequence[TableT]) -> TableT:
        """The rows of several tables, one table after the other."""
        each = [part.columns() for part in parts]
        columns: dict[str, Any] = {
            name: np.concatenate([own[name] for own in each]) for name in each[0]
        }
        return replace(parts[0], **columns)  # type: ignore[type-var]


def named(
    columns: Columns, is_wanted: Callable[[str], object], rows: IntArray | None = None
) -> BoolArray:
    """Which events' names fulfil a condition, which is asked once for each name.

    Args:
        columns: The events.
        is_wanted: The condition; an event without a name does not fulfil it.
        rows: The events to look at; None for all.
    """
    codes, names = (columns.name, columns.names) if rows is None else columns.codes("name", rows)
    return np.array([*(bool(is_wanted(name)) for name in names), False])[codes]


def distinct(values: IntArray) -> IntArray:
    """The distinct values, ascending.

    For millions of distinct numbers, `np.unique` takes 60 times as long: NumPy 2.3 and later hash
    them.
    """
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def places_by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """The distinct values, ascending, each with its places, ascending: one sort for all of them."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = [0, *first.tolist(), len(order)] if len(order) else []
    for begin, stop in pairwise(bounds):
        yield int(ordered[begin]), order[begin:stop]


def find(wanted: IntArray, ids: IntArray) -> IntArray:
    """Index in `ids` of each number wanted; `NULL` for those that are not there, and for `NULL`."""
    found = np.full(len(wanted), NULL)
    if len(ids) and len(wanted):
        order = np.argsort(ids, kind="stable")
        place = np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)
        hit = (ids[order][place] == wanted) & (wanted != NULL)
        found[hit] = order[place[hit]]
    return found


def place_in(wanted: IntArray, numbers: IntArray) -> IntArray:
    """Index of each number wanted in distinct, ascending numbers; `NULL` for those not there."""
    if not len(numbers):
        return np.full(len(wanted), NULL)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1:  # the usual case: none is left out
        return np.where((wanted >= first) & (wanted <= last), wanted - first, NULL)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return np.where(numbers[place] == wanted, place, NULL)


def by_place(place: IntArray, count: int) -> list[IntArray]:
    """The entries of each place from 0 to `count` - 1, ascending."""
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(count + 1))
    return [order[low:high] for low, high in pairwise(bounds)]


def changes(*columns: IntArray) -> BoolArray:
    """Whether each row differs from the one before it in any column; the first one does."""
    new = np.zeros(len(columns[0]), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def ranges(first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The integers first, first + 1, ... of several ranges, one range after the other.

    Args:
        first: The first of each range.
        counts: How many each range has.

    Returns:
        The index of the range of each integer, and the integers.
    """
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) + np.repeat(first - np.cumsum(counts) + counts, counts)


class Gathered:
    """A column that is appended to in parts; access to it never copies the whole column.

    Args:
        dtype: Type of its numbers.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._array = np.empty(_ROOM, dtype)
        self._size = 0

    def add(self, values: IntArray) -> None:
        """Adds numbers at the end."""
        size = self._size + len(values)
        if size > len(self._array):
            # What is not written to yet takes no memory.
            array = np.empty(2 * size, self._array.dtype)
            array[: self._size] = self._array[: self._size]
            self._array = array
        self._array[self._size : size] = values
        self._size = size

    def drop_last(self) -> None:
        """Removes the last number."""
        self._size -= 1

    def values(self) -> IntArray:
        """All numbers so far."""
        return self._array[: self._size]

    def take_values(self) -> IntArray:
        """All numbers so far; the column is empty afterwards, and their memory the caller's."""
        values = self.values()
        self._array, self._size = np.empty(0, self._array.dtype), 0
        return values


def memory_of(column: pa.Array) -> IntArray:
    """The values of a column of integers, without a copy; undefined where it is null.

    PyArrow's own conversions import pandas when they are first called.
    """
    kind, memory = np.dtype(column.type.to_pandas_dtype()), column.buffers()[1]
    if memory is None:
        return np.empty(0, dtype=kind)
    values: IntArray = np.frombuffer(memory, dtype=kind)
    return values[column.offset : column.offset + len(column)]


def numbers_of(array: Any, null: int) -> IntArray:
    """Returns the values of an integer column, with nulls replaced by a given number."""
    values = memory_of(array)
    if not array.null_count:
        return values
    bits = np.frombuffer(array.buffers()[0], dtype=np.uint8)
    known = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return np.where(known[array.offset :], values, values.dtype.type(null))


def _plausible(table: pa.Table) -> tuple[pa.Table, int]:
    limit = _LATEST_NS
    for name in ("start_ns", "end_ns", "enqueue_ns"):
        bounds = pc.min_max(table[name]).as_py()
        if bounds["min"] is not None and not -limit < bounds["min"] <= bounds["max"] < limit:
            break
    else:
        return table, 0
    keep = None
    for name in ("start_ns", "end_ns", "enqueue_ns"):
        column = table[name]
        good = pc.and_(pc.greater(column, -limit), pc.less(column, limit)).fill_null(True)
        keep = good if keep is None else pc.and_(keep, good)
    kept = table.filter(keep)
    return kept, table.num_rows - kept.num_rows
