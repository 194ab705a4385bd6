"""A bounded memory of things that are dear to make, safe for several threads."""

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
        make: Makes the value of a key.
        size: Size of a value.
        limit: Sum of sizes to keep; the last value is kept whatever its size.
    """

    def __init__(self, make: Callable[[K], V], size: Callable[[V], int], limit: int) -> None:
        self._make, self._size, self._limit = make, size, limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: K) -> V:
        """The value of a key, made if it is not at hand."""
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
