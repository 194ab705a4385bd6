"""What ran in a range of time: the events of some ranks, by kind and name, and two such ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.dashboard.timeline.tracks import Role

if TYPE_CHECKING:
    from ddltrace.dashboard.timeline.lod import I64
    from ddltrace.dashboard.timeline.tracks import Row, Timeline

_ROLES: Final = len(Role)


@dataclass(frozen=True)
class RangeRow:
    """The events of one kind and name in a range.

    Attributes:
        kind: What they are: ``layer``, ``collective``, ``kernel`` and others.
        name: Their common label; empty for steps, which are one row.
        ranks: Number of ranks that have some of them.
        count: Number of events that are in the range at least in part.
        total_ns: Their durations inside of the range, summed over ranks. Layers contain each
            other, and operations of several lanes run at once: the sums can exceed the range.
    """

    kind: str
    name: str
    ranks: int
    count: int
    total_ns: int


@dataclass(frozen=True)
class RangeDifference:
    """The events of one kind and name in a range of one trace, and in one of another.

    Attributes:
        kind: As in `RangeRow`.
        name: As in `RangeRow`; empty for all events of the kind.
        before_ns: Their durations inside of the first range: mean over its ranks.
        after_ns: The same of the second range.
    """

    kind: str
    name: str
    before_ns: float
    after_ns: float

    @property
    def change_ns(self) -> float:
        """What the second range has more."""
        return self.after_ns - self.before_ns


def summarize(
    timeline: Timeline, start_ns: int, end_ns: int, ranks: Collection[int] | None = None
) -> list[RangeRow]:
    """Returns what ran in a range, longest first.

    Args:
        timeline: The events.
        start_ns: Where the range begins, since the trace's first event.
        end_ns: Where it ends.
        ranks: Of which ranks; None for all.
    """
    size = max(1, len(timeline.names)) * _ROLES
    count, seen = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    total = np.zeros(size)
    chosen = set(timeline.busy if ranks is None else ranks)
    for rank, tracks in groupby(timeline.tracks, key=lambda track: track.rank):
        if rank not in chosen:
            continue
        keys, lengths = [], []
        for track in tracks:
            for row in timeline.rows[track.first_row : track.first_row + track.num_rows]:
                found = _inside(row, start_ns, end_ns)
                label = 0 if track.kind == "steps" else row.label(found).astype(np.int64)
                keys.append(label * _ROLES + row.role[found])
                begin = row.index.start[found]
                lengths.append(
                    np.minimum(row.index.end(found), end_ns) - np.maximum(begin, start_ns)
                )
        of_rank = np.concatenate(keys)
        counted = np.bincount(of_rank, minlength=size)
        count += counted
        seen += counted > 0
        total += np.bincount(of_rank, weights=np.concatenate(lengths), minlength=size)
    present = np.flatnonzero(count)
    order = present[np.lexsort((present, -total[present]))]
    return [
        RangeRow(
            Role(key % _ROLES).name.lower(),
            "" if key % _ROLES == Role.STEP else timeline.names[key // _ROLES],
            int(seen[key]),
            int(count[key]),
            round(total[key]),
        )
        for key in order.tolist()
    ]


def differences(
    before: Iterable[RangeRow], after: Iterable[RangeRow], num_ranks: tuple[int, int]
) -> tuple[list[RangeDifference], list[RangeDifference]]:
    """Compares two ranges.

    Args:
        before: What ran in the first.
        after: What ran in the second.
        num_ranks: Over how many ranks each was summed.

    Returns:
        The differences by kind, and those by kind and name, each with the largest first; without
        instants, which take no time.
    """
    of_names: dict[tuple[str, str], list[float]] = {}
    of_kinds: dict[tuple[str, str], list[float]] = {}
    for side, rows in enumerate((before, after)):
        for row in rows:
            for found, key in ((of_names, (row.kind, row.name)), (of_kinds, (row.kind, ""))):
                found.setdefault(key, [0.0, 0.0])[side] += row.total_ns / num_ranks[side]
    by_kind, by_name = (
        sorted(
            (RangeDifference(*key, *times) for key, times in found.items() if any(times)),
            key=lambda row: (-abs(row.change_ns), row.kind, row.name),
        )
        for found in (of_kinds, of_names)
    )
    return by_kind, by_name


def events_inside(timeline: Timeline, start_ns: int, end_ns: int) -> int:
    """Number of events that begin in a range."""
    edges = np.array([start_ns, end_ns], dtype=np.int64)
    return sum(int(np.diff(np.searchsorted(row.index.start, edges))[0]) for row in timeline.rows)


def _inside(row: Row, start_ns: int, end_ns: int) -> I64:
    """Positions of the intervals of a row that are in a range at least in part."""
    start = row.index.start
    first = max(int(np.searchsorted(start, start_ns, "right")) - 1, 0)
    last = int(np.searchsorted(start, end_ns, "left"))
    found = np.arange(first, max(first, last), dtype=np.int64)
    if len(found) and start[first] < start_ns and row.index.end(found[:1])[0] <= start_ns:
        found = found[1:]
    return found
