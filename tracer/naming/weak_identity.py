"""A mapping by identity, whose entries leave with their keys."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Entry(weakref.ref[_Key], Generic[_Key, _Value]):
    """A reference to an object, and what is known of it."""

    __slots__ = ("key", "value")
    key: int
    value: _Value


class WeakIdentityMap(Generic[_Key, _Value]):
    """What is known of objects of the job, for as long as the job keeps them.

    The library's own compares its keys, and tensors compare by their elements. An object's id can
    be given to another when it is gone: an entry counts only while its object is the one there.
    """

    def __init__(self) -> None:
        entries: dict[int, _Entry[_Key, _Value]] = {}

        def forget(gone: _Entry[_Key, _Value]) -> None:
            if entries.get(gone.key) is gone:  # the id may have come back
                del entries[gone.key]

        self._entries = entries
        self._forget = forget

    def set(self, thing: _Key, value: _Value) -> None:
        """Notes what is known of an object."""
        entry = _Entry(thing, self._forget)
        entry.key, entry.value = id(thing), value
        self._entries[entry.key] = entry

    def get(self, thing: _Key) -> _Value | None:
        """What is known of an object; None if nothing is."""
        entry = self._entries.get(id(thing))
        return entry.value if entry is not None and entry() is thing else None

    def pop(self, thing: _Key) -> _Value | None:
        """The same, and forgets it."""
        entry = self._entries.get(id(thing))
        if entry is None or entry() is not thing:
            return None
        self._entries.pop(entry.key, None)
        return entry.value

    def things(self) -> list[_Key]:
        """The objects of which something is known."""
        things = [entry() for entry in list(self._entries.values())]
        return [thing for thing in things if thing is not None]
