"""Replays a run without some of its work: how much earlier would each chunk of steps end?

The model is that of `dependencies.py`. A rank's own work takes its recorded time, less the time
that a scenario removes. A message is launched when the preceding work is complete, is released when
all ranks that it needs have launched it, and then takes its recorded transfer time, less the time
that the scenario removes. A rank that is blocked on it continues when it is complete. Communication
that compute hides completely stays hidden, so a replay is an upper bound of the savings. A rank
that is blocked on a message whose completion is not explained is blocked as long as it was, or, in
an elastic scenario, not at all.

All results are *gains*: how much earlier than recorded something happens, ns.

A long run is replayed in chunks of consecutive steps that start as recorded, all of them at once:
the cost is linear in the events, but the number of Python iterations only in the longest chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    IntArray,
    by_place,
    distinct,
    ranges,
)
from ddltrace.analyzer.events.interval_sets import Spans, lengths_within
from ddltrace.analyzer.joined.dependencies import Graph
from ddltrace.analyzer.joined.join import Joined

_NUMBERS_AT_ONCE: Final = 1 << 20
_MIN_STEPS: Final = 8
_UNBOUNDED: Final = 1 << 61
_LEVELS: Final = 4096
"""The approximate number of levels in a chunk, which are walked one by one."""


@dataclass(frozen=True)
class Scenario:
    """The work that a replay removes.

    Attributes:
        work: Rank -> the instants of its own work that take no time.
        transfers: For each message, how much of its transfer is taken out, ns; None for nothing.
        balanced: All ranks of a collective come when the first one does.
        elastic: Ranks are not blocked on messages whose end is unknown.
    """

    work: Mapping[int, Spans] = field(default_factory=dict)
    transfers: IntArray | None = None
    balanced: bool = False
    elastic: bool = False


@dataclass(frozen=True)
class StepEnds:
    """When each rank began and ended the steps that are replayed.

    Attributes:
        rank: The rank of each step of each rank.
        step: The number of each step.
        start: The start of each step, ns.
        end: When it ended.
        lead_in: The step before the first of these, which is replayed, too, but not measured:
            what is late at its end may be due to work in it. None if there is none.
    """

    rank: IntArray
    step: IntArray
    start: IntArray
    end: IntArray
    lead_in: int | None = None


class Replay:
    """A run that can be replayed in any number of scenarios.

    Args:
        graph: The dependency graph.
        joined: All messages.
        steps: The steps to replay.
    """

    def __init__(self, graph: Graph, joined: Joined, steps: StepEnds) -> None:
        self._graph, self._joined = graph, joined
        blocks, messages = graph.blocks, joined.messages
        self._ranks = len(blocks.ranks)
        measured = np.ones(len(steps.step), dtype=bool)
        if steps.lead_in is not None:
            measured = steps.step != steps.lead_in
        numbers = distinct(steps.step[measured])
        levels = int(graph.block_level.max(initial=0)) + 1
        per_chunk = max(_MIN_STEPS, _LEVELS * max(len(numbers), 1) // levels)
        self._chunks = -(-len(numbers) // per_chunk)
        chunk_of_step = np.where(measured, np.searchsorted(numbers, steps.step) // per_chunk, 0)
        self._steps = len(numbers)
        # Chunk k of the rank at place p is entry k * ranks + p: when it starts and ends.
        place = np.searchsorted(blocks.ranks, steps.rank)
        entry = chunk_of_step * self._ranks + place
        self._starts = np.full(self._chunks * self._ranks, np.iinfo(np.int64).max)
        self._ends = np.full(self._chunks * self._ranks, NULL_NS)
        np.minimum.at(self._starts, entry, steps.start)
        np.maximum.at(self._ends, entry[measured], steps.end[measured])
        lead_in = np.full((1, self._ranks), NULL_NS)
        lead_in[0, place[~measured]] = steps.end[~measured]
        self._block_chunk = self._chunk_of(blocks.place, blocks.end)
        self._block_ends = np.append(blocks.end, 0)
        row_place = np.searchsorted(blocks.ranks, messages.rank)
        self._row_place = row_place
        self._row_chunk = self._chunk_of(row_place, graph.handed_over)
        self._plan_joins()
        self._plan_blocks()
        self._plan_cuts(None if measured.all() else lead_in)

    def _chunk_of(self, place: IntArray, time: IntArray) -> IntArray:
        """The chunk in which each time of a rank lies; `NULL` for none."""
        chunk = np.full(len(time), NULL)
        starts = self._starts.reshape(self._chunks, self._ranks)
        ends = self._ends.reshape(self._chunks, self._ranks)
        for rank, mine in enumerate(by_place(place, self._ranks)):
            has = np.flatnonzero(ends[:, rank] != NULL_NS)
            if not len(has):
                continue
            found = np.searchsorted(starts[has, rank], time[mine], side="right") - 1
            inside = (found >= 0) & (time[mine] <= ends[has[-1], rank])
            chunk[mine] = np.where(inside, has[np.maximum(found, 0)], NULL)
        return chunk

    def _plan_joins(self) -> None:
        """Sorts the joins by level and finds the sources of the gain of each message.

        Index -1 of every array of gains is a row of zeros, for what nothing is gained on.
        """
        graph, messages = self._graph, self._joined.messages
        sizes = np.diff(graph.first)
        join_level = graph.join_level
        order = np.argsort(join_level, kind="stable")
        order = order[join_level[order] >= 0]
        which, rows = ranges(graph.first[order], sizes[order])
        self._join_order = order
        self._rows = graph.rows[rows]
        self._row_first = np.cumsum(sizes[order]) - sizes[order]
        join_chunk = np.full(len(sizes), NULL)
        if len(rows):
            of_join = order[which]
            np.maximum.at(join_chunk, of_join, self._row_chunk[self._rows])
            outside = self._row_chunk[self._rows] != join_chunk[of_join]
        else:
            outside = np.zeros(0, dtype=bool)
        self._row_start = messages.start[self._rows]
        self._row_time = graph.handed_over[self._rows]
        self._row_live = ~outside & (self._row_chunk[self._rows] != NULL)
        after = graph.after[self._rows]
        same = (after != NULL) & (
            np.append(self._block_chunk, NULL)[after] == self._row_chunk[self._rows]
        )
        self._row_after = np.where(same & self._row_live, after, NULL)
        former = graph.former[self._rows]
        self._row_former = former
        former_join = np.append(graph.join, NULL)[former]
        in_chunk = (former_join != NULL) & (
            np.append(join_chunk, NULL)[former_join] == self._row_chunk[self._rows]
        )
        self._row_former_join = np.where(in_chunk & self._row_live, former_join, NULL)
        release = np.full(len(sizes), NULL_NS)
        if len(order):
            release[order] = np.maximum.reduceat(self._row_start, self._row_first)
        self._release = release
        collective = np.append(self._joined.collective, NULL)
        self._shared = np.append(
            (sizes > 1) & (collective[graph.rows[graph.first[:-1]]] != NULL), False
        )
        self._join_chunk = join_chunk
        self._join_bounds = _bounds(join_level[order])

    def _plan_blocks(self) -> None:
        """Sorts the blocks by level and finds the sources of the gain of each block."""
        graph, messages, join_chunk = self._graph, self._joined.messages, self._join_chunk
        blocks = graph.blocks
        self._block_order = np.argsort(graph.block_level, kind="stable")
        before = np.arange(len(blocks)) - 1
        before[blocks.first[:-1][blocks.first[:-1] < len(blocks)]] = NULL
        same = (before != NULL) & (np.append(self._block_chunk, NULL)[before] == self._block_chunk)
        self._block_before = np.where(same, before, NULL)
        join = np.append(graph.join, NULL)[blocks.message]
        end = np.append(messages.end, NULL_NS)[blocks.message]
        complete = graph.done | ((end != NULL_NS) & (end <= blocks.start))
        held = (join != NULL) & ~complete & (end <= blocks.end + graph.tolerance_ns)
        held &= end != NULL_NS
        self._held = held
        self._unexplained = np.where(held | complete, 0, blocks.end - blocks.start)
        self._message_end = np.minimum(end, blocks.end)
        held_here = held & (np.append(join_chunk, NULL)[join] == self._block_chunk)
        self._block_join = np.where(held_here, join, NULL)
        self._block_bounds = _bounds(graph.block_level[self._block_order])

    def _plan_cuts(self, lead_in: IntArray | None) -> None:
        """Finds the stretches of own work before each message, block and end of a chunk.

        Args:
            lead_in: When each rank ended the step before the first chunk, see `_plan_ends`.
        """
        blocks = self._graph.blocks
        self._place_of = {rank: place for place, rank in enumerate(blocks.ranks)}
        live = np.where(self._row_live, self._row_chunk[self._rows], NULL)
        place = self._row_place[self._rows]
        self._before_rows = self._stretches(place, self._row_after, live, self._row_time)
        self._before_blocks = self._stretches(
            blocks.place, self._block_before, self._block_chunk, blocks.start
        )
        self._chunk_ends = self._plan_ends(self._ends.reshape(self._chunks, self._ranks))
        self._lead_in = None if lead_in is None else self._plan_ends(lead_in)

    def _plan_ends(self, ends: IntArray) -> _Ends:
        """Finds what the gain at the end of each rank in each chunk depends on.

        Args:
            ends: A time for each chunk and rank; `NULL_NS` for ranks without one.
        """
        chunk, place = np.nonzero(ends != NULL_NS)
        time = ends[chunk, place]
        last = np.full(len(time), NULL)
        for rank, mine in enumerate(by_place(place, self._ranks)):
            last[mine] = self._graph.blocks.before(rank, time[mine])
        same = (last != NULL) & (np.append(self._block_chunk, NULL)[last] == chunk)
        last = np.where(same, last, NULL)
        return _Ends(ends, chunk, place, last, self._stretches(place, last, chunk, time))

    def _stretches(
        self, place: IntArray, block: IntArray, chunk: IntArray, time: IntArray
    ) -> _Stretches:
        """Own work between the end of a block, or the start of the chunk without one, and a time.

        Args:
            place: The rank's.
            block: The block; `NULL` for none.
            chunk: In which the time lies; nothing is cut outside of chunks.
        """
        begin = np.append(self._starts, 0)[np.where(chunk == NULL, -1, chunk * self._ranks + place)]
        since = np.where(block == NULL, begin, self._block_ends[block])
        inside = np.flatnonzero(chunk != NULL)
        rows = [inside[mine] for mine in by_place(place[inside], self._ranks)]
        return _Stretches(since, np.maximum(time, since), rows)

    @property
    def has_unexplained(self) -> bool:
        """Whether a rank is blocked, within the steps, on a message whose end is unknown."""
        return bool((self._unexplained[self._block_chunk != NULL] > 0).any())

    @property
    def at_once(self) -> int:
        """How many scenarios are replayed together: bounds the memory."""
        return max(1, _NUMBERS_AT_ONCE // (len(self._graph.blocks) + len(self._rows) + 1))

    def saved(self, scenarios: Iterable[Scenario]) -> list[float]:
        """Returns the savings of each scenario: mean over the steps, ns per step, never negative.

        A chunk ends when its last rank does.

        Args:
            scenarios: Taken `at_once` together.
        """
        found: list[float] = []
        remaining = iter(scenarios)
        while some := list(islice(remaining, self.at_once)):
            found += self._saved(some) if self._steps else [0.0] * len(some)
        return found

    def _saved(self, scenarios: Sequence[Scenario]) -> list[float]:
        gains = self._walk(scenarios)
        gained = self._gained(gains, scenarios, self._chunk_ends)
        if self._lead_in is not None:
            gained[0] -= self._gained(gains, scenarios, self._lead_in)[0]
        saved = np.maximum(gained, 0).sum(axis=0) / self._steps
        return [float(value) for value in saved]

    def _gained(self, gains: IntArray, scenarios: Sequence[Scenario], at: _Ends) -> IntArray:
        """How much earlier the last rank is at some ends, shape (chunks, scenarios).

        Args:
            gains: At the end of every block.
        """
        ends = at.ends[:, :, None]
        replayed = np.repeat(ends, len(scenarios), axis=2)
        replayed[at.chunk, at.place] -= gains[at.last] + self._cut(scenarios, at.stretches)
        gained: IntArray = ends.max(axis=1) - replayed.max(axis=1)
        return gained

    def _walk(self, scenarios: Sequence[Scenario]) -> IntArray:
        """The gain at the end of every block; the last row is zeros."""
        count = len(scenarios)
        gains = _Gains(
            blocks=np.zeros((len(self._graph.blocks) + 1, count), dtype=np.int64),
            joins=np.zeros((len(self._graph.first), count), dtype=np.int64),
            row_cut=self._cut(scenarios, self._before_rows),
            block_cut=self._cut(scenarios, self._before_blocks),
            transfers=_stack([scenario.transfers for scenario in scenarios]),
            balanced=np.array([scenario.balanced for scenario in scenarios]),
            elastic=np.array([scenario.elastic for scenario in scenarios]),
        )
        joins, own = self._join_bounds, self._block_bounds
        for level in range(max(len(joins), len(own)) - 1):
            if level + 1 < len(joins) and joins[level] < joins[level + 1]:
                self._release_joins(gains, joins[level], joins[level + 1])
            if level + 1 < len(own) and own[level] < own[level + 1]:
                self._end_blocks(gains, self._block_order[own[level] : own[level + 1]])
        return gains.blocks

    def _release_joins(self, gains: _Gains, low: int, high: int) -> None:
        """The gains of the joins of one level: places `low` to `high` in their order."""
        first = self._row_first
        begin, stop = first[low], first[high] if high < len(first) else len(self._rows)
        rows = slice(begin, stop)
        gain = gains.blocks[self._row_after[rows]] + gains.row_cut[rows]
        queued = np.flatnonzero(self._row_former[rows] != NULL)
        if len(queued):
            former = self._row_former[rows][queued]
            behind = gains.joins[self._row_former_join[rows][queued]]
            if gains.transfers is not None:
                behind = behind + gains.transfers[former]
            spare = self._joined.messages.end[former] - self._row_time[rows][queued]
            gain[queued] = np.minimum(gain[queued] + spare[:, None], behind)
        begun = self._row_start[rows][:, None] - gain
        begins = first[low:high] - begin
        released = np.maximum.reduceat(begun, begins)
        which = self._join_order[low:high]
        if gains.balanced.any():
            early = np.minimum.reduceat(begun[:, gains.balanced], begins)
            shared = self._shared[which][:, None]
            released[:, gains.balanced] = np.where(shared, early, released[:, gains.balanced])
        gains.joins[which] = self._release[which][:, None] - released

    def _end_blocks(self, gains: _Gains, which: IntArray) -> None:
        """The gains of the blocks of one level."""
        blocks = self._graph.blocks
        gain = gains.blocks[self._block_before[which]] + gains.block_cut[which]
        gain += self._unexplained[which][:, None] * gains.elastic
        held = self._held[which]
        some = which[held]
        if len(some):
            done = gains.joins[self._block_join[some]]
            if gains.transfers is not None:
                done = done + gains.transfers[blocks.message[some]]
            spare = self._message_end[some] - blocks.start[some]
            own = gain[held] + spare[:, None]
            if gains.balanced.any():
                shared = self._shared[self._block_join[some]][:, None] & gains.balanced
                own = np.where(shared, _UNBOUNDED, own)
            gain[held] = np.minimum(own, done)
        gain[self._block_chunk[which] == NULL] = 0
        gains.blocks[which] = gain

    def _cut(self, scenarios: Sequence[Scenario], stretches: _Stretches) -> IntArray:
        """Work cut in each stretch, ns, shape (stretches, scenarios)."""
        found = np.zeros((len(stretches.since), len(scenarios)), dtype=np.int64)
        for number, scenario in enumerate(scenarios):
            for rank, spans in scenario.work.items():
                if rank not in self._place_of or not len(spans.start):
                    continue
                mine = stretches.rows[self._place_of[rank]]
                since, until = stretches.since[mine], stretches.until[mine]
                found[mine, number] = lengths_within(spans, since, until)
        return found


@dataclass(frozen=True)
class _Stretches:
    """Stretches of ranks' own work.

    Attributes:
        since: Start of each, ns.
        until: End of each, ns.
        rows: The stretches of each rank, by its place; those outside of all chunks are of none.
    """

    since: IntArray
    until: IntArray
    rows: Sequence[IntArray]


@dataclass(frozen=True)
class _Ends:
    """Times at which ranks end, one entry for each chunk and rank that has one.

    Attributes:
        ends: The times, shape (chunks, ranks); `NULL_NS` for none.
        chunk: The chunk of each entry.
        place: The rank's place.
        last: The last block before in the chunk; `NULL` for none.
        stretches: The own work since then.
    """

    ends: IntArray
    chunk: IntArray
    place: IntArray
    last: IntArray
    stretches: _Stretches


@dataclass(frozen=True)
class _Gains:
    """What a walk fills, one column per scenario, and what it takes from the scenarios.

    Attributes:
        blocks: At the end of each block.
        joins: At each join.
        row_cut: For each message of the joins: work removed since the preceding block.
        block_cut: For each block: work removed since the preceding block.
        transfers: For each message of the run: time removed from its transfer; None for none.
        balanced: One entry for each scenario.
        elastic: One entry for each scenario.
    """

    blocks: IntArray
    joins: IntArray
    row_cut: IntArray
    block_cut: IntArray
    transfers: IntArray | None
    balanced: BoolArray
    elastic: BoolArray


def _bounds(level: IntArray) -> list[int]:
    """Where each level begins in an ascending column, and its end."""
    top = int(level.max(initial=-1)) + 1
    return [int(place) for place in np.searchsorted(level, np.arange(top + 1))]


def _stack(columns: Sequence[IntArray | None]) -> IntArray | None:
    """The columns side by side, zeros for those that are None; None if all are."""
    filled = [column for column in columns if column is not None]
    if not filled:
        return None
    zeros = np.zeros(len(filled[0]), dtype=np.int64)
    return np.stack([zeros if column is None else column for column in columns], axis=1)
