"""The columns of an imported trace, made of NumPy arrays and of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.importers.names import Codes, clean
from ddltrace.tracer.trace.arrow_arrays import Booleans, integers, lists, strings
from ddltrace.tracer.trace.schema import EVENTS

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


def id_lists(values: Sequence[Sequence[int] | None]) -> pa.Array:
    """A column of lists of tensor ids."""
    kind = EVENTS.field("tensors").type
    missing = np.array([value is None for value in values], dtype=bool)
    lengths = np.array([len(value or ()) for value in values], dtype=np.int64)
    flat = np.array([entry for value in values for entry in value or ()], dtype=np.int32)
    return lists(flat, lengths, kind, missing)


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
