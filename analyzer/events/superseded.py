"""Rows of messages that were written twice: in flight, and again when they had completed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def drop_superseded(table: pa.Table) -> pa.Table:
    """Keeps the last row of each message id: the completed one, if it exists.

    Args:
        table: A rank's events, or its messages alone, in the order of recording.
    """
    if not any("open" in chunk.dictionary.to_pylist() for chunk in table["status"].chunks):
        return table
    if not is_open(table).any():
        return table
    ids = table["id"].combine_chunks().fill_null(-1).to_numpy(zero_copy_only=False)
    is_message = pc.equal(table["kind"], "message").fill_null(False).to_numpy()
    rows = np.flatnonzero(is_message & (ids >= 0))
    _, first_from_end = np.unique(ids[rows][::-1], return_index=True)
    keep = np.ones(table.num_rows, dtype=bool)
    keep[rows] = False
    keep[rows[::-1][first_from_end]] = True
    return table.filter(pa.array(keep))


def is_open(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows are messages that had not completed when they were written."""
    return np.asarray(pc.equal(table["status"], "open").fill_null(False).to_numpy())
