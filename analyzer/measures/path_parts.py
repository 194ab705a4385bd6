"""The critical paths of the steady steps by part, and by category and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.copies import DIRECTIONS, copy_direction
from ddltrace.analyzer.events.event_columns import NULL, FloatArray, IntArray
from ddltrace.analyzer.events.rank_timeline import CATEGORIES, CATEGORY
from ddltrace.analyzer.joined.critical_path import Path

MOST_PARTS: Final = 100
"""Parts that a report has."""

_DENSE: Final = 1 << 20
"""The most combinations of rank, category and name that are counted in one array."""
_PATHS_AT_ONCE: Final = 4096
_PIECES_AT_ONCE: Final = 1 << 18


@dataclass(frozen=True)
class PathTotals:
    """The critical path of a step by category; the categories sum to `total_us`, the wall.

    Attributes:
        total_us: The wall time of the step.
        compute_us: A layer, a gradient or an operator computes.
        transfer_us: A message that all its ranks have entered is transferred.
        wait_us: Waiting that is not explained by another rank's work.
        update_us: The optimizer.
        data_us: Fetching a batch.
        copy_us: A copy or fill on the device while no kernel runs.
        host_us: Host code outside of these.
        idle_us: Nothing was recorded at that time, or no thread of the process ran (its parts are
            called ``process stopped``).
    """

    total_us: float
    compute_us: float
    transfer_us: float
    wait_us: float
    update_us: float
    data_us: float
    copy_us: float
    host_us: float
    idle_us: float


@dataclass(frozen=True)
class CopyTimes:
    """Time of device copies by direction.

    Attributes:
        host_to_device_us: From the host's memory to the device.
        device_to_host_us: From the device to the host's memory.
        device_to_device_us: Within one device.
        peer_us: From one device to another.
        fill_us: Fills (memset).
        other_us: Copies whose name does not contain the direction.
    """

    host_to_device_us: float
    device_to_host_us: float
    device_to_device_us: float
    peer_us: float
    fill_us: float
    other_us: float


@dataclass(frozen=True)
class PathPart:
    """A layer, tensor or operation on the critical path, over the steady steps.

    Attributes:
        category: One of `CATEGORIES`.
        rank: Where.
        name: Layer, tensor or operation; None where it has none.
        us: Mean per step.
        alone_us: Upper bound on the savings per step if this part took no time on this rank and all
            else took as long as recorded, as in `Savings`. It is small if other ranks arrive nearly
            as late, and equals `us` for a trace of one rank. It exceeds `us` if the path of some
            steps passes through another rank that ends them no earlier.
        share: Share of the steps' wall time.
    """

    category: str
    rank: int
    name: str | None
    us: float
    alone_us: float
    share: float


@dataclass(frozen=True)
class PathRank:
    """The time of one category that the critical path spends on one rank, over the steady steps.

    All of them sum to the mean step.

    Attributes:
        category: One of `CATEGORIES`.
        rank: Where.
        us: Mean per step.
    """

    category: str
    rank: int
    us: float


def path_totals(path: Path) -> PathTotals:
    """A path by category; the categories sum to the total exactly (up to rounding to floats)."""
    totals = path.totals_ns()
    return PathTotals(
        total_us=sum(totals.values()) / 1e3,
        **{f"{name}_us": value / 1e3 for name, value in totals.items()},
    )


def path_copies(path: Path) -> CopyTimes:
    """The copies on a path by direction; they sum to its copies exactly."""
    rows = np.flatnonzero(path.category == CATEGORY["copy"])
    name, length = path.name[rows], (path.end - path.start)[rows]
    used, which = np.unique(name, return_inverse=True)
    sums = np.bincount(which, weights=length, minlength=len(used))
    times = dict.fromkeys(DIRECTIONS, 0.0)
    for code, total in zip(used.tolist(), sums.tolist(), strict=True):
        times[copy_direction("" if code == NULL else path.names[code])] += total / 1e3
    return CopyTimes(*times.values())


class PathSums(NamedTuple):
    """Sums of the pieces of paths, means per path.

    Attributes:
        parts: By category, rank and name, the largest first.
        by_rank: By category and rank; complete.
    """

    parts: tuple[PathPart, ...]
    by_rank: tuple[PathRank, ...]


def path_parts(paths: Sequence[Path], most: int | None = MOST_PARTS) -> PathSums:
    """Sums the pieces of paths.

    What each part costs on its rank alone is left to `ddltrace.analyzer.measures.savings`.

    Args:
        paths: The critical paths of the steady steps, all of one analysis.
        most: At most this many parts; None for all.
    """
    if not paths:
        return PathSums((), ())
    names = paths[0].names
    stride = len(names) + 1
    sums = _Sums(stride * len(CATEGORIES) * (1 + max(map(_last_rank, paths))))
    first = 0
    while first < len(paths):
        # As many paths at a time as make the calls worth while, and no more.
        sizes = np.cumsum([len(path) for path in paths[first : first + _PATHS_AT_ONCE]])
        count = 1 + int(np.searchsorted(sizes, _PIECES_AT_ONCE))
        some = paths[first : first + count]
        rank, category, name, length = (
            np.concatenate(columns)
            for columns in zip(
                *((each.rank, each.category, each.name, each.end - each.start) for each in some),
                strict=True,
            )
        )
        key = (rank.astype(np.int64) * len(CATEGORIES) + category) * stride + name + 1
        sums.add(key, length)
        first += count
    keys, whole = sums.found()
    total = float(whole.sum())
    parts = []
    for i in np.argsort(-whole, kind="stable")[:most].tolist():
        if not whole[i]:
            break
        place, code = divmod(int(keys[i]), stride)
        parts.append(
            PathPart(
                category=CATEGORIES[place % len(CATEGORIES)],
                rank=place // len(CATEGORIES),
                name=None if code - 1 == NULL else names[code - 1],
                us=float(whole[i]) / len(paths) / 1e3,
                alone_us=float(whole[i]) / len(paths) / 1e3,
                share=float(whole[i]) / total if total else 0.0,
            )
        )
    of_rank = np.bincount(keys // stride, weights=whole) / len(paths) / 1e3
    by_rank = [
        PathRank(
            CATEGORIES[place % len(CATEGORIES)], place // len(CATEGORIES), float(of_rank[place])
        )
        for place in np.flatnonzero(of_rank).tolist()
    ]
    return PathSums(tuple(parts), tuple(by_rank))


def _last_rank(path: Path) -> int:
    return int(path.rank.max(initial=0))


class _Sums:
    """Sums by key, of keys below a limit: in an array where that is small, else sorted."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dense = np.zeros(limit) if limit <= _DENSE else None
        self._keys: list[IntArray] = []
        self._values: list[FloatArray] = []

    def add(self, keys: IntArray, values: IntArray) -> None:
        """Adds each value to the sum of its key."""
        if self._dense is not None:
            self._dense += np.bincount(keys, weights=values, minlength=self._limit)
            return
        used, which = np.unique(keys, return_inverse=True)
        self._keys.append(used)
        self._values.append(np.bincount(which, weights=values).astype(np.float64))

    def found(self) -> tuple[IntArray, FloatArray]:
        """The keys and the sum of each."""
        if self._dense is not None:
            return np.arange(self._limit), self._dense
        keys, which = np.unique(np.concatenate(self._keys), return_inverse=True)
        return keys, np.bincount(which, weights=np.concatenate(self._values)).astype(np.float64)
