"""A first picture of a long trace: the tracks of a sample of its events.

Of each rank some stretches are read, evenly spread over the run. Between them nothing is known yet,
and the timeline says so: `Timeline.unread`. The intervals have no event numbers, because those
count all events of a rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from ddltrace.dashboard.timeline.lod import RowIndex
from ddltrace.dashboard.timeline.rank_events import gather
from ddltrace.dashboard.timeline.tracks import NO_EVENT, RankTracks, Row, Timeline

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_BATCHES: Final = 64
"""Batches that are read of all ranks together: about a second."""

_ROWS: Final = 400_000
"""Events that are arranged of all ranks together: about a second."""

_RANKS: Final = 128
"""More ranks than this take too long: some of each host are read."""


def coarse_timelines(trace: Trace) -> dict[int, Timeline]:
    """The timelines of samples of a trace's ranks."""
    ranks = _some(trace)
    batches = max(2, _BATCHES // max(1, len(ranks)))
    rows = max(256, _ROWS // max(1, len(ranks) * batches))
    samples = {rank: _Sample(trace.sample(rank, batches, rows)) for rank in ranks}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        gathered = list(pool.map(lambda rank: gather(iter(samples[rank]), rank), ranks))
    origin = min((s.earliest for s in samples.values() if s.earliest is not None), default=0)
    found = {}
    for rank, events in zip(ranks, gathered, strict=True):
        timeline = Timeline()
        RankTracks(timeline, trace, events, origin).add()
        timeline.rows = [
            replace(row, event=np.full(len(row.event), NO_EVENT, np.int32)) for row in timeline.rows
        ]
        # At the ends of a sample's stretches it is not known what hides communication.
        for track in timeline.tracks:
            if track.kind == "exposed":
                timeline.rows[track.first_row] = _empty(timeline.rows[track.first_row])
        timeline.indexes = {}
        gaps = samples[rank].gaps
        timeline.unread = {rank: [(begin - origin, end - origin) for begin, end in gaps]}
        found[rank] = timeline
    span = max((timeline.span_ns for timeline in found.values()), default=0)
    for rank in trace.ranks:
        if rank not in found:
            found[rank] = Timeline(unread={rank: [(0, span)]})
    return found


class _Sample:
    """Tables of a rank's events, which are forgotten once they are passed on.

    Attributes:
        earliest: The earliest start so far.
        gaps: Times between the events of consecutive tables so far.
    """

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self.earliest: int | None = None
        self.gaps: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[pa.Table]:
        last: int | None = None
        for table in self._tables:
            if not table.num_rows:
                continue
            if self.earliest is None:
                self.earliest = int(table["start_ns"].to_numpy().min())
            # Events are recorded when they end.
            if last is not None and last < (first := _recorded(table, 0)):
                self.gaps.append((last, first))
            last = _recorded(table, -1)
            yield table


def _some(trace: Trace) -> list[int]:
    """So many ranks as can be read at once: of each host the first ones."""
    if len(trace.ranks) <= _RANKS:
        return list(trace.ranks)
    of_host: dict[str, list[int]] = {}
    for info in sorted(trace.run.ranks, key=lambda info: info.rank):
        of_host.setdefault(info.host, []).append(info.rank)
    in_turns = chain.from_iterable(zip_longest(*of_host.values()))
    wanted = dict.fromkeys(rank for rank in in_turns if rank is not None)
    return sorted(islice(wanted, _RANKS))


def _empty(row: Row) -> Row:
    index = RowIndex(row.index.start[:0], row.index.start[:0])
    return Row(index, row.event[:0], row.name[:0], row.role[:0])


def _recorded(table: pa.Table, row: int) -> int:
    end = table["end_ns"][row].as_py()
    start: int = table["start_ns"][row].as_py()
    return start if end is None else int(end)
