"""A file of Arrow messages that are provided one by one, when Arrow reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any


class MessageFeed(io.RawIOBase):
    """A file of messages, each of which is taken from an iterator when Arrow reads it.

    Args:
        messages: The messages, none of them empty, in the order of the file.
    """

    def __init__(self, messages: Iterable[bytes | memoryview]) -> None:
        self._rest = iter(messages)
        self._now = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, target: Any) -> int:
        """Copies the next bytes of the current message; 0 at the end."""
        part = self.read_buffer(len(target))
        target[: len(part)] = part
        return len(part)

    def read_buffer(self, size: int) -> memoryview:
        """The next bytes of the current message, without a copy; none at the end.

        Arrow calls this, if it exists, for the header and for the body of a message.
        """
        if not len(self._now):
            self._now = memoryview(next(self._rest, b""))
        part, self._now = self._now[:size], self._now[size:]
        return part
