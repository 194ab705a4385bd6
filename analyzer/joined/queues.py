"""Finds messages that waited in a queue until an earlier message of the same queue had ended.

A process group runs few messages at a time: Gloo two, NCCL one. A message that is enqueued while
the group is busy begins when one of the earlier messages ends: until then, it waits for that
message, and not for the concurrent work of its rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, IntArray
from ddltrace.analyzer.joined.join import Joined

_HANDOVER_NS: Final = 200_000
"""Maximum delay between the end of a message and the next start in a queue that it occupied."""


class Queues:
    """For each message, the message that it waited for in its queue.

    Args:
        joined: All messages.
    """

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self._former = find_formers(joined)

    def starting(self, rank: int, at_ns: int) -> int | None:
        """Returns the row of a rank's message that begins at an instant; None if there is none."""
        rows = self._joined.rows(rank)
        starts = self._joined.messages.start[rows]
        place = int(np.searchsorted(starts, at_ns))
        if place == len(starts) or starts[place] != at_ns:
            return None
        return int(rows.start) + place

    def former(self, row: int) -> int | None:
        """Returns the row of the message whose end let another one begin; see `find_formers`."""
        former = int(self._former[row])
        return None if former == NULL else former


def find_formers(joined: Joined) -> IntArray:
    """Returns, for each message, the row of the message whose end let it begin.

    That is the last to end of those of its rank and group that ended before it began, if it
    had been enqueued by then.

    Returns:
        One row per message; `NULL` for a message that did not wait in its queue, or for unknown
        reasons.
    """
    messages = joined.messages
    ended = np.flatnonzero(messages.end != NULL_NS)
    began = np.arange(len(messages))
    rows = np.concatenate([ended, began])
    time = np.concatenate([messages.end[ended], messages.start])
    begins = np.concatenate([np.zeros(len(ended), bool), np.ones(len(began), bool)])
    # At one instant ends come before beginnings, and of messages without duration their own last.
    order = np.lexsort((begins, time, messages.group[rows], messages.rank[rows]))
    place = np.where(begins[order], NULL, np.arange(len(order)))
    last = np.maximum.accumulate(place)
    at = np.flatnonzero(begins[order])
    row, before = rows[order[at]], last[at]
    known = before >= 0
    row, former = row[known], rows[order[before[known]]]
    end, start = messages.end[former], messages.start[row]
    kept = (messages.rank[former] == messages.rank[row]) & (former != row)
    kept &= messages.group[former] == messages.group[row]
    kept &= end > np.maximum(messages.enqueue[row], start - _HANDOVER_NS)
    found = np.full(len(messages), NULL)
    found[row[kept]] = former[kept]
    return found
