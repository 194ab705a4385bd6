"""A mapping by identity, whose entries leave with their keys."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class WeakIdentityMap(Generic[_Key, _Value]):
    """What is known of objects of the job, for as long as the job keeps them.

    The library's own compares its keys, and tensors compare by their elements. An object's id can
    be given to another when it is gone: an entry counts only while its object is the one there.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[_Key], _Value]] = {}

    def set(self, thing: _Key, value: _Value) -> None:
        """Notes what is known of an object."""
        key, entries = id(thing), self._entries

        def forget(gone: weakref.ref[_Key]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is gone:  # the id may have come back
                del entries[key]

        entries[key] = weakref.ref(thing, forget), value

    def get(self, thing: _Key) -> _Value | None:
        """What is known of an object; None if nothing is."""
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def pop(self, thing: _Key) -> _Value | None:
        """The same, and forgets it."""
        value = self.get(thing)
        if value is not None:
            self._entries.pop(id(thing), None)
        return value

    def things(self) -> list[_Key]:
        """The objects of which something is known."""
        things = [reference() for reference, _ in list(self._entries.values())]
        return [thing for thing in things if thing is not None]
