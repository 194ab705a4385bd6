"""Assigns events to the rows of a trace viewer; intervals of one row must nest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import places_by_value

Integers = npt.NDArray[np.int64]

_FIRST_LANES: Final = ("main", "thread", "comm", "stream")


@dataclass(frozen=True)
class Track:
    """One row: a lane, or one of the rows of a lane with overlapping intervals.

    Attributes:
        name: The displayed name.
        rows: Rows of the table, by start, outer intervals before those inside.
    """

    name: str
    rows: Integers


def tracks_of(table: pa.Table, end_ns: Integers) -> list[Track]:
    """Splits a rank's events into tracks.

    Args:
        table: The events.
        end_ns: End of each event; unfinished ones end where the trace does.
    """
    start = table["start_ns"].to_numpy()
    lane = table["lane"].combine_chunks()
    codes = lane.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    names = lane.dictionary.to_pylist()
    kinds = table["kind"].combine_chunks()
    outer_first = _KindOrder(kinds.dictionary.to_pylist()).of(kinds.indices.to_numpy())
    found = []
    lanes = sorted(places_by_value(codes), key=lambda each: _lane_key(names, each[0]))
    for code, rows in lanes:
        # Of intervals with the same start the longer one is outside; then a step before its
        # phases, and a phase before what happens in it.
        ordered = rows[np.lexsort((outer_first[rows], -end_ns[rows], start[rows]))]
        name = names[code] if code >= 0 else "events"
        for number, part in enumerate(_nesting(start[ordered], end_ns[ordered])):
            suffix = f" ({number + 1})" if number else ""
            found.append(Track(name + suffix, ordered[part]))
    return found


def ends_of(table: pa.Table) -> Integers:
    """End of each event; what was not finished ends at the last time in the table.

    A message that completed at an unknown time has no length: none takes no time, so that readers
    can tell.
    """
    start = table["start_ns"].to_numpy()
    if not len(start):
        return np.empty(0, dtype=np.int64)
    last = int(start.max())
    end = table["end_ns"].combine_chunks()
    known = end.drop_null().to_numpy()
    if len(known):
        last = max(last, int(known.max()))
    filled: Integers = end.fill_null(last).to_numpy(zero_copy_only=False)
    completed = pc.and_(
        pc.is_null(end), pc.equal(table["status"].combine_chunks().cast("string"), "ok")
    )
    filled = np.where(pc.fill_null(completed, False).to_numpy(zero_copy_only=False), start, filled)
    ends: Integers = np.maximum(filled, start)
    return ends


class _KindOrder:
    """Orders kinds from the outside in."""

    _ORDER: Final = ("step", "phase", "data", "layer", "marker", "host")

    def __init__(self, kinds: list[str]) -> None:
        last = len(self._ORDER)
        self._rank = np.array(
            [self._ORDER.index(kind) if kind in self._ORDER else last for kind in kinds] or [0]
        )

    def of(self, codes: npt.NDArray[np.int8]) -> Integers:
        ranks: Integers = self._rank[codes]
        return ranks


def _lane_key(names: list[str], code: int) -> tuple[int, str]:
    if code < 0:
        return (len(_FIRST_LANES) + 1, "")
    name = names[code]
    family = name.split("-")[0].split("/")[0]
    place = _FIRST_LANES.index(family) if family in _FIRST_LANES else len(_FIRST_LANES)
    return (place, name)


def _nesting(start: Integers, end: Integers) -> list[Integers]:
    """Splits intervals, outer first, into as few parts as a greedy choice gives that nest."""
    everything = np.arange(len(start))
    if len(start) < 2 or bool(np.all(start[1:] >= np.maximum.accumulate(end)[:-1])):
        return [everything]
    part_of = np.zeros(len(start), dtype=np.int64)
    stacks: list[list[int]] = []
    starts, ends = start.tolist(), end.tolist()
    for number in range(len(starts)):
        begin, stop = starts[number], ends[number]
        for part, stack in enumerate(stacks):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or stop <= stack[-1]:
                stack.append(stop)
                part_of[number] = part
                break
        else:
            part_of[number] = len(stacks)
            stacks.append([stop])
    return [places for _, places in places_by_value(part_of)]
