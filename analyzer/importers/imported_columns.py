"""Arrow columns straight from NumPy's memory.

``pyarrow.array`` imports pandas when it is first called, which takes longer than reading a
trace of a hundred thousand events; so do its ``to_numpy`` and others. These few lines build
the same columns without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.importers.names import Codes, clean
from ddltrace.tracer.trace.schema import EVENTS

_NUMPY: Final[dict[Any, np.dtype[Any]]] = {
    pa.int8(): np.dtype(np.int8),
    pa.int16(): np.dtype(np.int16),
    pa.int32(): np.dtype(np.int32),
    pa.int64(): np.dtype(np.int64),
}
Missing = npt.NDArray[np.bool_]


def integers(
    values: npt.NDArray[Any], missing: Missing | None = None, kind: pa.DataType | None = None
) -> pa.Array:
    """A column of integers.

    Args:
        values: One per row.
        missing: True where the row has none.
        kind: The Arrow type; 64 bits by default.
    """
    kind = pa.int64() if kind is None else kind
    data = np.ascontiguousarray(values, dtype=_NUMPY[kind])
    valid = None
    if missing is not None and missing.any():
        valid = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(data), [valid, pa.py_buffer(data)])


def strings(values: Sequence[str]) -> pa.Array:
    """A column of text."""
    encoded = [value.encode() for value in values]
    ends = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def coded(
    field: str, codes: npt.NDArray[Any], values: Sequence[Any], missing: Missing | None = None
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
    limit = int(np.iinfo(_NUMPY[index_type]).max) - 1
    texts = [clean(value) for value in values]
    if len(texts) > limit:
        texts = [*texts[:limit], "(other)"]
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
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value or ()) for value in values], out=ends[1:])
    flat = np.array([entry for value in values for entry in value or ()], dtype=np.int32)
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing.any() else None
    child = integers(flat, None, kind.value_type)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(ends)], children=[child])


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
