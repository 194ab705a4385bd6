"""Arrow arrays made from their buffers.

``pyarrow.array`` imports pandas where that is installed, to see whether it was given one of
its objects: seconds and tens of megabytes in a job that never asked for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]


def strings(words: Sequence[str]) -> pa.Array:
    """Strings; what UTF-8 cannot hold (lone surrogates) is replaced."""
    encoded = [word.encode("utf-8", "replace") for word in words]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(word) for word in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def integer_columns(values: Integers, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Columns of integers in which a negative value stands for null.

    Args:
        values: One row for each column.
        types: The Arrow type of each column.
    """
    valid = values >= 0
    nulls = values.shape[1] - np.count_nonzero(valid, axis=1)
    bitmaps = np.packbits(valid, axis=1, bitorder="little")
    return [
        integers(column, type_, pa.py_buffer(bitmap) if count else None, int(count))
        for column, type_, bitmap, count in zip(values, types, bitmaps, nulls, strict=True)
    ]


def scalar(value: str | int) -> pa.Scalar:
    """A string or an integer, as `pyarrow.compute` takes it beside a column."""
    if isinstance(value, str):
        return strings([value])[0]
    return integers(np.array([value]), pa.int64())[0]


def lists(values: Integers, lengths: Integers, type_: pa.DataType) -> pa.Array:
    """Lists of integers; one without items is null.

    Args:
        values: The items of all lists, end to end.
        lengths: How many of them each list has.
        type_: The Arrow list type.
    """
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    valid = lengths > 0
    nulls = len(lengths) - int(np.count_nonzero(valid))
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
    items = integers(values, type_.value_type)
    buffers = [bitmap, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(type_, len(lengths), buffers, nulls, children=[items])


def integers(
    values: Integers,
    type_: pa.DataType,
    bitmap: pa.Buffer | None = None,
    nulls: int = 0,
) -> pa.Array:
    """Integers.

    Args:
        values: Of any size that the type can hold.
        type_: The Arrow type.
        bitmap: Which are valid, as Arrow has it; by default all.
        nulls: How many are not.
    """
    column = values.astype(_numpy_type(type_))
    return pa.Array.from_buffers(type_, len(column), [bitmap, pa.py_buffer(column)], nulls)


@functools.cache
def _numpy_type(type_: pa.DataType) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(type_.to_pandas_dtype())
    return found
