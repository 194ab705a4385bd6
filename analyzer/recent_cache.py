"""A thread-safe cache of expensive values with bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentCache(Generic[K, V]):
    """Keeps the most recently used values, up to a sum of their sizes.

    Args:
        make: Creates the value of a key.
        size: Size of a value.
        limit: Maximum sum of sizes; the last value is always kept.
    """

    def __init__(self, make: Callable[[K], V], size: Callable[[V], int], limit: int) -> None:
        self._make, self._size, self._limit = make, size, limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: K) -> V:
        """The value of a key, created if it is not in the cache."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            value = self._make(key)
            self._values[key] = value
            self._total += self._size(value)
            while len(self._values) > 1 and self._total > self._limit:
                _, dropped = self._values.popitem(last=False)
                self._total -= self._size(dropped)
            return value

    def __contains__(self, key: K) -> bool:
        return key in self._values
