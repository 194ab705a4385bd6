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


@dataclass(frozen=True)
class EventIndex:
    """A rank's messages, its waits, and the tensors of all its events.

    Attributes:
        messages: Columns of the messages, and in ``event`` their rows among the rank's events,
            ascending.
        waits: Some columns of the waits.
        tensors: The ids of the tensors of every event, one list per event.
        recorded: Position of each event in the order of recording; None if it equals the event's
            number.
    """

    messages: pa.Table
    waits: pa.Table
    tensors: pa.ListArray
    recorded: npt.NDArray[np.int32] | None = None

    def message(self, event: int) -> dict[str, Any] | None:
        """The message in a row of the rank's events; None if the row holds another event."""
        rows = self.messages["event"].to_numpy()
        at = int(np.searchsorted(rows, event))
        if at == len(rows) or rows[at] != event:
            return None
        row: dict[str, Any] = self.messages.slice(at, 1).to_pylist()[0]
        return row

    def __len__(self) -> int:
        return len(self.tensors)

    def place(self, event: int) -> int:
        """The position of an event in the order of recording, including superseded rows."""
        return event if self.recorded is None else int(self.recorded[event])

    def with_tensors(self, ids: list[int]) -> npt.NDArray[np.bool_]:
        """Marks the events that concern one of some tensors, shape (events,)."""
        parents = pc.list_parent_indices(self.tensors).to_numpy(zero_copy_only=False)
        hit = np.isin(pc.list_flatten(self.tensors).to_numpy(zero_copy_only=False), ids)
        touched = np.zeros(len(self.tensors), dtype=bool)
        touched[parents[hit]] = True
        return touched
