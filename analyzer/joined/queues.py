"""Messages that could not begin because those before them in the same queue had not ended.

A process group works on few messages at a time, Gloo on two, NCCL on one. A message that was
enqueued while it was busy begins when one of those before it ends: until then it waits for that
one, and not for what its rank does at the time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL_NS, IntArray
from ddltrace.analyzer.joined.join import Joined

_HANDOVER_NS: Final = 200_000
"""A queue that goes on later than this after a message has ended was not busy with it."""


class _Queue(NamedTuple):
    """The messages of one group on one rank whose ends are known, by end.

    Attributes:
        end: When each ended, ns.
        row: Which it is.
    """

    end: IntArray
    row: IntArray


class Queues:
    """Tells of each message which one it waited for in its queue.

    Args:
        joined: All messages.
    """

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._queues: dict[int, dict[int, _Queue]] = {}  # by rank and group

    def starting(self, rank: int, at_ns: int) -> int | None:
        """Row of a rank's message that begins at an instant; None if there is none."""
        rows = self._joined.rows(rank)
        starts = self._joined.messages.start[rows]
        place = int(np.searchsorted(starts, at_ns))
        if place == len(starts) or starts[place] != at_ns:
            return None
        return int(rows.start) + place

    def former(self, row: int) -> int | None:
        """Row of the message whose end let another one begin.

        Args:
            row: Of the other one.

        Returns:
            Its row; None if that did not have to wait in its queue, or nobody can tell for what.
        """
        messages = self._joined.messages
        start, enqueue = int(messages.start[row]), int(messages.enqueue[row])
        queue = self._of(int(messages.rank[row])).get(int(messages.group[row]))
        if queue is None:
            return None
        place = int(np.searchsorted(queue.end, start, side="right")) - 1
        if place < 0 or queue.end[place] <= max(enqueue, start - _HANDOVER_NS):
            return None
        former = int(queue.row[place])
        return former if former != row else None

    def _of(self, rank: int) -> dict[int, _Queue]:
        """A rank's queues, by group."""
        if rank not in self._queues:
            messages, rows = self._joined.messages, self._joined.rows(rank)
            row = np.flatnonzero(messages.end[rows] != NULL_NS) + rows.start
            row = row[np.lexsort((messages.end[row], messages.group[row]))]
            groups, begins = np.unique(messages.group[row], return_index=True)
            own = [row[first:beyond] for first, beyond in pairwise((*begins, len(row)))]
            self._queues[rank] = {
                int(group): _Queue(messages.end[of_group], of_group)
                for group, of_group in zip(groups, own, strict=True)
            }
        return self._queues[rank]
