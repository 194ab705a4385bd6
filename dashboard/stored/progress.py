"""How far the reading of a trace's events is, for a page that waits for it."""

from __future__ import annotations

import threading


class Progress:
    """Counts the events that were read.

    Args:
        events: How many there are.

    Attributes:
        events: How many there are.
        read: How many were read so far.
        is_under_way: Whether someone reads them now.
    """

    def __init__(self, events: int) -> None:
        self.events = events
        self.read = 0
        self.is_under_way = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Adds some events that were read."""
        with self._lock:
            self.read = min(self.events, self.read + count)

    def to_json(self) -> dict[str, int | bool]:
        """The same as an object for the browser."""
        return {"events": self.events, "read": self.read, "under_way": self.is_under_way}
