"""The columns of a rank's events that clicks and searches need, kept in memory.

A trace keeps only its most recently used ranks in memory, and reading a rank with millions of
events again takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_OF_WAITS = ("start_ns", "end_ns", "parent")


@dataclass(frozen=True)
class EventIndex:
    """A rank's messages, its waits, and the tensors of all its events.

    Attributes:
        messages: Columns of the messages, and in ``event`` their rows among the rank's events,
            ascending.
        waits: Some columns of the waits.
        tensors: The ids of the tensors of every event, one list per event.
    """

    messages: pa.Table
    waits: pa.Table
    tensors: pa.ListArray

    def message(self, event: int) -> dict[str, Any] | None:
        """The message in a row of the rank's events; None if the row holds another event."""
        rows = self.messages["event"].to_numpy()
        at = int(np.searchsorted(rows, event))
        if at == len(rows) or rows[at] != event:
            return None
        row: dict[str, Any] = self.messages.slice(at, 1).to_pylist()[0]
        return row

    def with_tensors(self, ids: list[int]) -> npt.NDArray[np.bool_]:
        """Marks the events that concern one of some tensors, shape (events,)."""
        parents = pc.list_parent_indices(self.tensors).to_numpy(zero_copy_only=False)
        hit = np.isin(pc.list_flatten(self.tensors).to_numpy(zero_copy_only=False), ids)
        touched = np.zeros(len(self.tensors), dtype=bool)
        touched[parents[hit]] = True
        return touched


def index_events(table: pa.Table) -> EventIndex:
    """Extracts the kept columns from a rank's events."""
    messages, waits = (_rows_of(table, kind) for kind in ("message", "wait"))
    return EventIndex(
        messages=table.take(messages).append_column("event", messages).combine_chunks(),
        waits=table.select(_OF_WAITS).take(waits),
        tensors=table["tensors"].combine_chunks(),
    )


def _rows_of(table: pa.Table, kind: str) -> pa.Array:
    return pc.indices_nonzero(pc.fill_null(pc.equal(table["kind"], kind), False))
