"""The result of a reader of another tool's format, and what readers make it of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.importers.names import Codes, clean
from ddltrace.tracer.trace.arrow_arrays import Booleans, integers, lists, strings
from ddltrace.tracer.trace.run_info import RunInfo
from ddltrace.tracer.trace.schema import EVENTS

MAX_TIME_NS: Final = 1 << 62
"""A larger time counts as damage; the limit allows sums of times without overflow."""


@dataclass
class ImportedTrace:
    """A trace of another tool in this project's terms.

    Attributes:
        run: Metadata of the run; `source` names the format.
        tables: Segment name -> its events, a table of schema `EVENTS`.
    """

    run: RunInfo
    tables: dict[str, pa.Table]


_FAR_NS: Final = 10**8
_FAR_FROM_BEGINNING_NS: Final = 10**11
_TIMES_FAR: Final = 1000
"""So many times the recording before all others, an interval that begins at 0 covers nothing."""


def without_time(
    start: npt.NDArray[Any],
    duration: npt.NDArray[Any],
    *,
    ns: int = 1,
    may_begin_at_0: bool = False,
) -> npt.NDArray[np.bool_]:
    """Which intervals have the time 0 because theirs is unknown.

    Args:
        start: When each begins, shape (intervals,).
        duration: How long each lasts.
        ns: Length of the unit of these times, nanoseconds.
        may_begin_at_0: Whether the clock may begin with the recording, so that a pause may follow a
            first interval at 0.
    """
    zero = start == 0
    others = ~zero
    if not zero.any() or not others.any():
        return np.zeros(len(start), dtype=bool)
    begin, end = start[others].min(), (start + duration)[others].max()
    far = max(end - begin, _FAR_NS // ns)
    if may_begin_at_0:
        far = max(10 * far, _FAR_FROM_BEGINNING_NS // ns)
    unknown: npt.NDArray[np.bool_] = zero & ((begin - duration > far) | (begin > _TIMES_FAR * far))
    return unknown


OTHER: Final = "(other)"
"""The entry that values share for which a column has no room."""


def coded(
    field: str, codes: npt.NDArray[Any], values: Sequence[Any], missing: Booleans | None = None
) -> pa.DictionaryArray:
    """A dictionary-coded column; values beyond what its index can count share one entry.

    Args:
        field: The column of `EVENTS`.
        codes: Index into `values` per row.
        values: The distinct values.
        missing: True where the row has none.
    """
    index_type = EVENTS.field(field).type.index_type
    # Arrow unifies dictionaries only while their length, too, fits into the type of the index.
    limit = (1 << (index_type.bit_width - 1)) - 2
    texts = [clean(value) for value in values]
    if len(texts) > limit:
        texts = [*texts[:limit], OTHER]
        codes = np.minimum(codes, limit)
    # Cutting and mending can make two names one: a dictionary holds each value once.
    distinct = list(dict.fromkeys(texts))
    if len(distinct) != len(texts):
        position = {text: number for number, text in enumerate(distinct)}
        codes = np.array([position[text] for text in texts])[codes]
    return pa.DictionaryArray.from_arrays(integers(codes, missing, index_type), strings(distinct))


def coded_list(field: str, values: Sequence[str | None]) -> pa.DictionaryArray:
    """A dictionary-coded column from one value per row."""
    codes = Codes()
    missing = np.array([value is None for value in values], dtype=bool)
    numbers = np.array(codes.of(values), dtype=np.int32)
    return coded(field, numbers, ["" if key is None else key for key in codes], missing)


def optional_integers(values: Sequence[int | None], kind: pa.DataType | None = None) -> pa.Array:
    """A column of integers from one value per row."""
    missing = np.array([value is None for value in values], dtype=bool)
    return integers(np.array([value or 0 for value in values], dtype=np.int64), missing, kind)


def list_column(name: str, values: Sequence[Sequence[int] | None]) -> pa.Array:
    """A column of lists of integers.

    Args:
        name: Its name in `EVENTS`.
        values: One for each row; None for null.
    """
    missing = np.array([value is None for value in values], dtype=bool)
    lengths = np.array([len(value or ()) for value in values], dtype=np.int64)
    flat = np.array([entry for value in values for entry in value or ()], dtype=np.int64)
    return lists(flat, lengths, EVENTS.field(name).type, missing)


def events_table(rows: int, columns: dict[str, pa.Array]) -> pa.Table:
    """A table of schema `EVENTS`; columns that are not given are null."""
    zeros = pa.py_buffer(bytes(8 * (rows + 1)))
    return pa.Table.from_arrays(
        [
            columns[field.name] if field.name in columns else _nulls(field.type, rows, zeros)
            for field in EVENTS
        ],
        schema=EVENTS,
    )


def _nulls(kind: pa.DataType, rows: int, zeros: pa.Buffer) -> pa.Array:
    """A column of nulls. All share one buffer: most columns of a foreign trace are empty."""
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(_nulls(kind.index_type, rows, zeros), strings([]))
    if pa.types.is_list(kind):
        values = integers(np.empty(0, dtype=np.int32), None, kind.value_type)
        return pa.Array.from_buffers(kind, rows, [zeros, zeros], children=[values])
    return pa.Array.from_buffers(kind, rows, [zeros, zeros])


@dataclass(slots=True)
class Row:
    """One event; the columns of `EVENTS`."""

    start_ns: int
    end_ns: int | None
    kind: str
    name: str | None = None
    lane: str | None = None
    step: int | None = None
    phase: str | None = None
    id: int | None = None
    parent: int | None = None
    op: str | None = None
    group: str | None = None
    seq: int | None = None
    peer: int | None = None
    tag: int | None = None
    bytes: int | None = None
    out_bytes: int | None = None
    wire_bytes: int | None = None
    dtype: str | None = None
    enqueue_ns: int | None = None
    status: str | None = None
    clock: str | None = None
    buffer: int | None = None
    shapes: str | None = None
    samples: int | None = None
    tokens: int | None = None
    flops: int | None = None
    tensors: Sequence[int] | None = None
    split_bytes: Sequence[int] | None = None


def table_of(rows: Sequence[Row]) -> pa.Table:
    """The rows as a table of schema `EVENTS`."""
    columns = {}
    for entry in fields(Row):
        values = [getattr(row, entry.name) for row in rows]
        kind = EVENTS.field(entry.name).type
        if pa.types.is_list(kind):
            columns[entry.name] = list_column(entry.name, values)
        elif pa.types.is_dictionary(kind):
            columns[entry.name] = coded_list(entry.name, values)
        else:
            columns[entry.name] = optional_integers(values, kind)
    return events_table(len(rows), columns)
