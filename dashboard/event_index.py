"""What of a rank's events is kept at hand, because a click or a search asks for it.

A trace keeps only its most recent ranks in memory, and reading one again takes seconds where
it has millions of events.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_OF_MESSAGES = ("start_ns", "end_ns", "op", "group", "seq", "peer", "tag")
_OF_WAITS = ("start_ns", "end_ns", "parent")


@dataclass(frozen=True)
class EventIndex:
    """A rank's messages, its waits, and the tensors of all its events.

    Attributes:
        messages: Some of their columns, and in ``event`` their rows in the rank's events.
        waits: Some of their columns.
        tensors: Ids of the tensors of every event, a list for each.
    """

    messages: pa.Table
    waits: pa.Table
    tensors: pa.ListArray

    def with_tensors(self, ids: list[int]) -> npt.NDArray[np.bool_]:
        """Which events concern one of some tensors, shape (events,)."""
        parents = pc.list_parent_indices(self.tensors).to_numpy(zero_copy_only=False)
        hit = np.isin(pc.list_flatten(self.tensors).to_numpy(zero_copy_only=False), ids)
        touched = np.zeros(len(self.tensors), dtype=bool)
        touched[parents[hit]] = True
        return touched


def index_events(table: pa.Table) -> EventIndex:
    """Takes out of a rank's events what is kept."""
    messages, rows = _of_kind(table, "message", _OF_MESSAGES)
    waits, _ = _of_kind(table, "wait", _OF_WAITS)
    return EventIndex(
        messages=messages.append_column("event", rows),
        waits=waits,
        tensors=table["tensors"].combine_chunks(),
    )


def _of_kind(table: pa.Table, kind: str, columns: tuple[str, ...]) -> tuple[pa.Table, pa.Array]:
    rows = pc.indices_nonzero(pc.fill_null(pc.equal(table["kind"], kind), False))
    return table.select(columns).take(rows), rows
