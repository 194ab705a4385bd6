"""Arrow arrays made from their buffers.

``pyarrow.array`` imports pandas where that is installed, to see whether it was given one of
its objects: seconds and tens of megabytes in a job that never asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def strings(words: Sequence[str]) -> pa.Array:
    """Strings; what UTF-8 cannot hold (lone surrogates) is replaced."""
    encoded = [word.encode("utf-8", "replace") for word in words]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(word) for word in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def integers(
    values: npt.NDArray[np.int64], type_: pa.DataType, valid: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Integers of an Arrow type, null where they are not valid."""
    column = np.ascontiguousarray(values, dtype=np.dtype(type_.to_pandas_dtype()))
    return pa.Array.from_buffers(
        type_, len(column), [_bitmap(valid), pa.py_buffer(column)], _null_count(valid)
    )


def lists(values: Sequence[Sequence[int] | None], type_: pa.DataType) -> pa.Array:
    """Lists of integers, or null."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(v) if v is not None else 0 for v in values], out=offsets[1:])
    flat = np.array([item for v in values if v is not None for item in v], np.int64)
    valid = np.array([v is not None for v in values], np.bool_)
    return pa.Array.from_buffers(
        type_,
        len(values),
        [_bitmap(valid), pa.py_buffer(offsets)],
        _null_count(valid),
        children=[integers(flat, type_.value_type)],
    )


def _bitmap(valid: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def _null_count(valid: npt.NDArray[np.bool_] | None) -> int:
    return 0 if valid is None else int(len(valid) - np.count_nonzero(valid))
