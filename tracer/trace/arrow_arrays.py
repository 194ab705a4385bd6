"""Arrow arrays made from NumPy's memory.

``pyarrow.array`` imports pandas if it is installed, to recognize its objects. That takes longer
than reading a trace of a hundred thousand events, and tens of megabytes in a job that never asked
for it. The analyzer's commands, which do not share their process with a job, use `without_pandas`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def without_pandas() -> None:
    """Keeps PyArrow from importing pandas in this process until something converts to pandas.

    PyArrow looks for pandas once, when it first takes a Python object; if there is none, it looks
    again only for conversions such as ``Table.to_pandas``.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.scalar(0)
    finally:
        sys.meta_path.remove(finder)


def strings(words: Sequence[str]) -> pa.Array:
    """A column of text; characters that UTF-8 cannot encode (lone surrogates) are replaced."""
    encoded = [word.encode("utf-8", "replace") for word in words]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(word) for word in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def integers(
    values: npt.NDArray[Any], missing: Booleans | None = None, kind: pa.DataType | None = None
) -> pa.Array:
    """A column of integers.

    Args:
        values: One per row, of any size that the type can hold.
        missing: True where the row is null; by default nowhere.
        kind: The Arrow type; 64 bits by default.
    """
    kind = pa.int64() if kind is None else kind
    if missing is None or not missing.any():
        return _column(values, kind)
    bitmap = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return _column(values, kind, bitmap, int(np.count_nonzero(missing)))


def floats(values: npt.NDArray[Any]) -> pa.Array:
    """A column of double-precision numbers without nulls."""
    return _column(values, pa.float64())


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
        _column(column, kind, pa.py_buffer(bitmap) if count else None, int(count))
        for column, kind, bitmap, count in zip(values, types, bitmaps, nulls, strict=True)
    ]


def scalar(value: str | int) -> pa.Scalar:
    """A string or an integer, as `pyarrow.compute` takes it beside a column."""
    return (strings([value]) if isinstance(value, str) else integers(np.array([value])))[0]


def lists(
    values: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    kind: pa.DataType,
    missing: Booleans | None = None,
) -> pa.Array:
    """A column of lists of integers.

    Args:
        values: The items of all lists, end to end.
        lengths: Number of items of each list.
        kind: The Arrow list type.
        missing: True where the row is null; by default where the list has no items.
    """
    missing = lengths == 0 if missing is None else missing
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    nulls = int(np.count_nonzero(missing))
    bitmap = pa.py_buffer(np.packbits(~missing, bitorder="little")) if nulls else None
    items = _column(values, kind.value_type)
    buffers = [bitmap, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(lengths), buffers, nulls, children=[items])


def _column(
    values: npt.NDArray[Any], kind: pa.DataType, bitmap: pa.Buffer | None = None, nulls: int = 0
) -> pa.Array:
    """A column of numbers.

    Args:
        values: One per row.
        kind: The Arrow type.
        bitmap: Arrow's validity bitmap; by default all rows are valid.
        nulls: Number of null rows.
    """
    data = np.ascontiguousarray(values, dtype=_numpy_type(kind))
    return pa.Array.from_buffers(kind, len(data), [bitmap, pa.py_buffer(data)], nulls)


@functools.cache
def _numpy_type(kind: pa.DataType) -> np.dtype[Any]:
    # Types of numbers have the same names in Arrow and NumPy. `to_pandas_dtype` may import pandas.
    found: np.dtype[Any] = np.dtype(str(kind))
    return found
