"""The lane above all ranks: the critical path of every step, piece by piece.

Steps that overlap, because one rank starts the next step before another ends the last one, have
rows of their own. A piece is identified by its number: its position in the concatenated paths of
all steps. All times here are nanoseconds since the trace's first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.joined.critical_path import Path, PathPiece
from ddltrace.dashboard.timeline.lod import I64, RowIndex
from ddltrace.dashboard.timeline.packing import cut_overlaps, pack
from ddltrace.dashboard.timeline.tracks import Role, Row, Timeline

NO_RANK: Final = -1
"""The rank of intervals that belong to no rank."""

_ROLE: Final = np.array([Role[category.upper()] for category in CATEGORIES], dtype=np.uint8)
_MAX_ROWS: Final = 4
_TABLE_SHARE: Final = 4
"""Possible keys for each key up to which a table of them is made."""


@dataclass(frozen=True)
class PathLane:
    """The lane of a trace.

    Attributes:
        rows: Its rows; the event of an interval is the number of its piece.
        first_row: The number of its first row, after the rows of the timeline.
        steps: Numbers of the steps, in the order of their starts.
        paths: Their critical paths.
        first: Number of the first piece of each path, then the total number of pieces.
        origin_ns: Time of the trace's first event.
    """

    rows: list[Row]
    first_row: int
    steps: list[int]
    paths: list[Path]
    first: I64
    origin_ns: int

    def piece(self, number: int) -> tuple[int, Path, PathPiece]:
        """The step of a piece, its path, and the piece itself, on the trace's clock.

        Raises:
            ValueError: The piece does not exist.
        """
        if not 0 <= number < int(self.first[-1]):
            raise ValueError(f"the critical paths have {int(self.first[-1])} pieces")
        at = int(np.searchsorted(self.first, number, side="right")) - 1
        path = self.paths[at]
        return self.steps[at], path, path[number - int(self.first[at])]


def build_path_lane(
    paths_of_steps: Mapping[int, Path], timeline: Timeline, origin_ns: int
) -> PathLane:
    """Builds the lane and adds its labels to the timeline's.

    Args:
        paths_of_steps: Step -> its critical path.
        timeline: The timeline of the same trace.
        origin_ns: Time of the trace's first event.
    """
    found = sorted(
        ((path, step) for step, path in paths_of_steps.items() if len(path)),
        key=lambda pair: int(pair[0].start[0]),
    )
    paths = [path for path, _ in found]
    steps = [step for _, step in found]
    first = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    lane = PathLane([], len(timeline.rows), steps, paths, first, origin_ns)
    if not paths:
        return lane
    begins = np.array([path.start[0] for path in paths], dtype=np.int64)
    ends = np.array([path.end[-1] for path in paths], dtype=np.int64)
    row = np.repeat(pack(begins, ends, _MAX_ROWS), np.diff(first))
    start, end, role, name = _columns(paths, timeline)
    for number in range(int(row.max()) + 1):
        mine = np.flatnonzero(row == number)
        mine = mine[np.argsort(start[mine], kind="stable")]
        own = start[mine] - origin_ns
        index = RowIndex(own, cut_overlaps(own, end[mine] - origin_ns))
        lane.rows.append(Row(index, mine.astype(np.int32), name[mine], role[mine]))
    return lane


def _distinct(keys: I64) -> tuple[I64, I64]:
    """The distinct keys, ascending, and the place of each key among them."""
    top = int(keys.max()) + 1
    if top > _TABLE_SHARE * len(keys):
        distinct, places = np.unique(keys, return_inverse=True)
        return distinct, places
    # A table of all possible keys, which are few, takes a tenth of the time of sorting.
    occurs = np.zeros(top, dtype=bool)
    occurs[keys] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[keys]


def _columns(
    paths: list[Path], timeline: Timeline
) -> tuple[I64, I64, npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Start, end, role and label of all pieces. A label includes the rank, which changes."""
    start, end, rank, category, name = (
        np.concatenate([getattr(path, column) for path in paths], dtype=dtype)
        for column, dtype in (
            ("start", np.int64),
            ("end", np.int64),
            ("rank", np.int32),
            ("category", np.int8),
            ("name", np.int32),
        )
    )
    names = [*paths[0].names, *CATEGORIES]  # a piece without a name shows its category
    called = np.where(name >= 0, name, len(names) - len(CATEGORIES) + category.astype(np.int32))
    pairs, which = _distinct(rank.astype(np.int64) * len(names) + called)
    texts = [f"rank {pair // len(names)}: {names[pair % len(names)]}" for pair in pairs.tolist()]
    return start, end, _ROLE[category], timeline.intern(texts)[which]
