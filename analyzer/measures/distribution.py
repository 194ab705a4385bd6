"""Distributions of measured values that can be merged: their medians and percentiles.

One process keeps all values, and its percentiles are exact. Partial results of many ranges of steps
have their values rounded to bins of 1 % instead, as in DDSketch (Masson, Rim and Lee, VLDB 2019):
such a distribution has some thousand bins at most, percentiles are within 0.5 %, and the result
does not depend on how the values were divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray, IntArray

_LOG_RATIO: Final = float(np.log(1.01))
"""Logarithm of the ratio between the values of two bins in a row."""


@dataclass(frozen=True)
class Distribution:
    """Some values and how often each occurs.

    Attributes:
        values: The values, any order; ascending if they are rounded.
        counts: How often each occurs; None if each entry counts once.
    """

    values: FloatArray
    counts: IntArray | None = None

    def __len__(self) -> int:
        """How many values it has."""
        return len(self.values) if self.counts is None else int(self.counts.sum())

    def median(self) -> float | None:
        """The median; None without values."""
        if self.counts is None:
            return float(np.median(self.values)) if len(self.values) else None
        return self.percentile(50)

    def percentile(self, percent: float) -> float | None:
        """A percentile; None without values.

        Args:
            percent: From 0 to 100.
        """
        if not len(self.values):
            return None
        if self.counts is None:
            return float(np.percentile(self.values, percent))
        # Interpolates between two values, as NumPy does.
        ends = np.cumsum(self.counts)
        place = percent / 100 * (int(ends[-1]) - 1)
        below, above = int(np.floor(place)), int(np.ceil(place))
        low, high = self.values[np.searchsorted(ends, [below, above], side="right")].tolist()
        return float(low + (place - below) * (high - low))

    def rounded(self) -> Distribution:
        """The same distribution with values rounded to bins of 1 %."""
        if self.counts is not None:
            return self
        values, counts = np.unique(round_values(self.values), return_counts=True)
        return Distribution(values, counts)


def round_values(values: FloatArray) -> FloatArray:
    """Rounds values to bins of 1 %; rounded ones remain as they are."""
    magnitude = np.abs(values)
    bins = np.rint(np.log(np.where(magnitude > 0, magnitude, 1.0)) / _LOG_RATIO)
    # Equal bins give the same number, so that values of different parts can be compared.
    return np.asarray(np.sign(values) * np.exp(bins * _LOG_RATIO))


def merged(parts: Sequence[Distribution]) -> Distribution:
    """One distribution of the values of all parts; rounded if there is more than one part."""
    if len(parts) == 1:
        return parts[0]
    rounded = [part.rounded() for part in parts]
    if not rounded:
        return Distribution(np.empty(0))
    values, which = np.unique(
        np.concatenate([part.values for part in rounded]), return_inverse=True
    )
    counts = [np.empty(0, np.int64) if part.counts is None else part.counts for part in rounded]
    sums = np.bincount(which, weights=np.concatenate(counts), minlength=len(values))
    return Distribution(values, sums.astype(np.int64))


Key = TypeVar("Key")
Record = TypeVar("Record")
"""A dataclass."""


def with_rounded(record: Record) -> Record:
    """A record whose distributions are rounded."""
    whole: Any = record
    values = {field.name: getattr(record, field.name) for field in fields(whole)}
    rounded = {
        name: value.rounded() for name, value in values.items() if isinstance(value, Distribution)
    }
    changed: Record = replace(whole, **rounded)
    return changed


def merged_sums(parts: Sequence[Record]) -> Record:
    """A record of the sums of numbers, and of the merged distributions, of some records."""
    if len(parts) == 1:
        return parts[0]
    first: Any = parts[0]
    found: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        is_distribution = isinstance(values[0], Distribution)
        found[field.name] = merged(values) if is_distribution else sum(values)
    whole: Record = replace(first, **found)
    return whole


def merged_records(
    former: dict[Key, Record],
    later: dict[Key, Record],
    merge: Callable[[Sequence[Record]], Record] = merged_sums,
) -> dict[Key, Record]:
    """Records by key: those of both, merged where both have the key."""
    both = {key: merge([former[key], later[key]]) for key in former if key in later}
    return former | later | both
