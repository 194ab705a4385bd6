"""A mapping keyed by object identity, whose entries disappear with their keys."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Entry(weakref.ref[_Key], Generic[_Key, _Value]):
    """A weak reference to an object, with its value."""

    __slots__ = ("key", "value")
    key: int
    value: _Value


class WeakIdentityMap(Generic[_Key, _Value]):
    """Maps objects of the job to values for as long as the objects exist.

    `weakref.WeakKeyDictionary` compares keys, and tensors compare elementwise. An id can be reused
    after its object is deleted: an entry counts only while its own object exists.
    """

    def __init__(self) -> None:
        entries: dict[int, _Entry[_Key, _Value]] = {}

        def forget(gone: _Entry[_Key, _Value]) -> None:
            if entries.get(gone.key) is gone:  # the id may be in use again
                del entries[gone.key]

        self._entries = entries
        self._forget = forget

    def set(self, key: _Key, value: _Value) -> None:
        """Sets the value of an object."""
        entry = _Entry(key, self._forget)
        entry.key, entry.value = id(key), value
        self._entries[entry.key] = entry

    def get(self, key: _Key) -> _Value | None:
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(key))
        return entry.value if entry is not None and entry() is key else None

    def pop(self, key: _Key) -> _Value | None:
        """Removes an object; returns its value or None."""
        entry = self._entries.get(id(key))
        if entry is None or entry() is not key:
            return None
        self._entries.pop(entry.key, None)
        return entry.value

    def live_keys(self) -> list[_Key]:
        """The objects that have a value."""
        keys = [entry() for entry in list(self._entries.values())]
        return [key for key in keys if key is not None]
