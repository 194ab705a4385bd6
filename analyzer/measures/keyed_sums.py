"""Sums of the numbers of rows by a key, over many tables of rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")
"""A dataclass."""

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


class RowSums(Generic[Row]):
    """Adds up all numbers of rows, also those of records in them, by key, as `KeyedSums` does.

    Args:
        key: Fields that tell the rows apart.
    """

    def __init__(self, *key: str) -> None:
        self._key = key
        self._first: dict[tuple[Any, ...], Row] = {}
        self._numbers: dict[str, bool] = {}
        self._sums: KeyedSums[tuple[Any, ...]] = KeyedSums(0)

    def add(self, rows: Sequence[Row], weight: float = 1.0, *, of: Hashable = None) -> None:
        """Adds rows.

        Args:
            rows: The rows, each of another key.
            weight: A factor for their numbers.
            of: A further part of their keys.
        """
        if rows and not self._first:
            self._numbers = {
                name: is_int for name, is_int in _numbers_of(rows[0]) if name not in self._key
            }
            self._sums = KeyedSums(len(self._numbers))
        keys = [(of, *(getattr(row, name) for name in self._key)) for row in rows]
        for key, row in zip(keys, rows, strict=True):
            self._first.setdefault(key, row)
        getters = [attrgetter(name) for name in self._numbers]
        self._sums.add(keys, [[get(row) for get in getters] for row in rows], weight)

    def rows(self, weight: float = 1.0, digits: int | None = None) -> list[Row]:
        """One row per key, in the order in which they came; see `by`."""
        return [row for rows in self.by(weight, digits).values() for row in rows]

    def by(self, weight: float = 1.0, digits: int | None = None) -> dict[Hashable, list[Row]]:
        """The rows of each `of`. What is no number in them is that of the first row of the key.

        Args:
            weight: What the sums are divided by.
            digits: Decimals to which they are rounded.
        """
        found: dict[Hashable, list[Row]] = {}
        for key, sums in self._sums.items():
            row: Any = self._first[key]
            inner: dict[str, dict[str, Any]] = {}
            for (name, is_int), value in zip(self._numbers.items(), sums, strict=True):
                mean = None if value is None else value / weight
                places = None if is_int else digits
                rounded = is_int or digits is not None
                place, _, last = name.rpartition(".")
                inner.setdefault(place, {})[last] = (
                    mean if mean is None or not rounded else round(mean, places)
                )
            own = inner.pop("", {})
            parts = {name: replace(getattr(row, name), **of) for name, of in inner.items()}
            found.setdefault(key[0], []).append(replace(row, **own, **parts))
        return found


_NUMBERS: Final = {"int": True, "int | None": True, "float": False, "float | None": False}


def _numbers_of(row: Any) -> Iterator[tuple[str, bool]]:
    """The names of the numbers in a record, and whether they are integers."""
    for field in fields(row):
        value = getattr(row, field.name)
        if field.type in _NUMBERS:
            yield field.name, _NUMBERS[str(field.type)]
        elif is_dataclass(value):
            yield from ((f"{field.name}.{name}", is_int) for name, is_int in _numbers_of(value))


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
