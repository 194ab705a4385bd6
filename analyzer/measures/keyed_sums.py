"""Sums of the numbers of rows by a key, over many tables of rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Key = TypeVar("Key", bound=Hashable)

_ROOM: Final = 64


class KeyedSums(Generic[Key]):
    """Adds up rows of numbers by key; a sum is unknown if none of its numbers is known.

    Args:
        width: How many numbers a row has.
    """

    def __init__(self, width: int) -> None:
        self._places: dict[Key, int] = {}
        self._sums = np.zeros((_ROOM, width))
        self._known = np.zeros((_ROOM, width), dtype=bool)

    def add(
        self, keys: Sequence[Key], rows: Iterable[Sequence[float | None]], weight: float = 1.0
    ) -> None:
        """Adds rows.

        Args:
            keys: Their keys, each once.
            rows: The numbers of each; None for unknown ones.
            weight: A factor for all of them.
        """
        if not keys:
            return
        places = np.array([self._places.setdefault(key, len(self._places)) for key in keys])
        missing = len(self._places) - len(self._sums)
        if missing > 0:
            more = ((0, max(missing, len(self._sums))), (0, 0))
            self._sums, self._known = np.pad(self._sums, more), np.pad(self._known, more)
        values = np.array(list(rows), dtype=np.float64)
        known: npt.NDArray[np.bool_] = ~np.isnan(values)
        self._sums[places] += np.where(known, values, 0.0) * weight
        self._known[places] |= known

    def items(self) -> Iterator[tuple[Key, list[float | None]]]:
        """Yields every key, in the order in which they came, and its sums."""
        count = len(self._places)
        for key, sums, known in zip(
            self._places, self._sums[:count].tolist(), self._known[:count].tolist(), strict=True
        ):
            yield (
                key,
                [value if is_known else None for value, is_known in zip(sums, known, strict=True)],
            )


_MOST_UNKNOWN: Final = 0.5
"""A saving is unknown if it was not found for more than this part of the steps."""


class SavingSums(NamedTuple):
    """What is known of a saving that only the worst entries of a range have."""

    rows: KeyedSums[Any]

    def add(self, found: Mapping[Any, tuple[float, float] | None], weight: float) -> None:
        """Adds the lowest and highest savings in a range; None where they are not known."""
        unknown = (0.0, 0.0, 1.0)
        rows = [unknown if saved is None else (*saved, 0.0) for saved in found.values()]
        self.rows.add(list(found), rows, weight)

    def means(self, whole: float) -> dict[Any, tuple[float, float] | None]:
        """Key -> the mean per step over the ranges in which it is known."""
        found: dict[Any, tuple[float, float] | None] = {}
        for key, (low, high, unknown) in self.rows.items():
            known = whole - (unknown or 0.0)
            some = known >= (1 - _MOST_UNKNOWN) * whole
            found[key] = ((low or 0.0) / known, (high or 0.0) / known) if some else None
        return found
