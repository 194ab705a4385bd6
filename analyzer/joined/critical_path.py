"""The critical path of a step over all ranks.

The walk goes backward from the latest end in the step. On a rank, it follows the order of the
rank's work. If the rank was blocked on a collective, the walk continues on the last rank to arrive,
at a receive on the sender, at the arrival time of that rank; the time after it is transfer.
If all ranks had arrived before the rank began to wait, the whole wait is transfer and the walk
continues before it on the same rank. If a rank arrived late because its queue was busy, the walk
continues in the message that occupied the queue, see `dependencies.py`. So every instant between
the step's earliest start and latest end belongs to exactly one piece, and the pieces sum to the
step's wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    ColumnTable,
    IntArray,
    changes,
    distinct,
    places_by_value,
)
from ddltrace.analyzer.events.interval_sets import Spans, divided_at, overlaps, touched
from ddltrace.analyzer.events.rank_scan import RankBlocks
from ddltrace.analyzer.events.rank_timeline import CATEGORIES, CATEGORY, Timeline
from ddltrace.analyzer.joined.dependencies import Queues
from ddltrace.analyzer.joined.join import Joined

_PIECES_AT_ONCE: Final = 1 << 16
_LAST: Final = np.iinfo(np.int64).max
_LOCAL: Final = -1
"""Category of a stretch that follows the rank's own timeline."""


_Stretch: TypeAlias = tuple[int, int, int, int, int]
"""Rank, start, end, category and message of a stretch."""


class Window(NamedTuple):
    """The window of a path: the time [start, end), walked backward from a rank."""

    start: int
    end: int
    last_rank: int


@dataclass(frozen=True)
class PathPiece:
    """One piece of a critical path.

    Attributes:
        rank: Where.
        category: One of `CATEGORIES`.
        name: Layer, tensor or operation; None where it has none.
        start_ns: On rank 0's clock.
        end_ns: Start of the next piece.
        message: Row in `Joined.messages` of the message that it waits for; None for others.
    """

    rank: int
    category: str
    name: str | None
    start_ns: int
    end_ns: int
    message: int | None


@dataclass(frozen=True)
class Path:
    """A critical path in the order of time: piece i ends where i + 1 starts.

    Attributes:
        edge: Bounds of the pieces, ns: one more than there are pieces.
        rank: The rank of each piece.
        category: Code in `CATEGORY`.
        name: Index into `names`; `NULL` for none.
        message: Row in `Joined.messages`; `NULL` for none.
        names: Shared by the paths of one analysis.
    """

    edge: IntArray
    rank: IntArray
    category: IntArray
    name: IntArray
    message: IntArray
    names: list[str]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def start(self) -> IntArray:
        """Start of every piece, ns."""
        return self.edge[:-1]

    @property
    def end(self) -> IntArray:
        """End of every piece, ns."""
        return self.edge[1:]

    def __iter__(self) -> Iterator[PathPiece]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> PathPiece:
        name, message = int(self.name[place]), int(self.message[place])
        return PathPiece(
            rank=int(self.rank[place]),
            category=CATEGORIES[self.category[place]],
            name=None if name == NULL else self.names[name],
            start_ns=int(self.start[place]),
            end_ns=int(self.end[place]),
            message=None if message == NULL else message,
        )

    def totals_ns(self) -> dict[str, int]:
        """Category -> its time on the path; the values sum to the path's length exactly."""
        length = self.end - self.start
        return {name: int(length[self.category == code].sum()) for name, code in CATEGORY.items()}


@dataclass(frozen=True)
class Pieces(ColumnTable):
    """Pieces of paths, in few bytes each, as there may be one for every event.

    Attributes:
        start: Start of each, ns.
        end: Its end.
        category: Code in `CATEGORY`.
        name: Index into `names`; `NULL` for none.
        stretch: Index of the stretch that it is a part of, ascending.
        names: The names that occur.
    """

    start: IntArray
    end: IntArray
    category: IntArray
    name: IntArray
    stretch: IntArray
    names: list[str]


@dataclass(frozen=True)
class _Stretches(ColumnTable):
    """What walks find: waits for messages, and parts of ranks' timelines (category `_LOCAL`).

    `window` is the index of the path of each.
    """

    rank: IntArray
    start: IntArray
    end: IntArray
    category: IntArray
    message: IntArray
    name: IntArray
    window: IntArray


class PathFinder:
    """Finds critical paths.

    Walks the windows first, for which the blocks of the ranks suffice; then describes the stretches
    of every rank that the paths visit along its timeline, one rank at a time.

    Args:
        joined: All messages.
        blocks: Gives the blocks at which the path stops on a rank.
        describe: Describes parts of ranks' timelines, see `describe_stretches`; the results have
            the order of the ranks.
        tensor_names: Gives a rank's names of tensors by id.
    """

    def __init__(
        self,
        joined: Joined,
        blocks: Callable[[int], RankBlocks],
        describe: Callable[[Mapping[int, Spans]], Iterable[Pieces]],
        tensor_names: Callable[[int], dict[int, str]],
    ) -> None:
        self._joined = joined
        self._queues = Queues(joined)
        self._blocks = blocks
        self._describe_ranks = describe
        self._tensor_names = tensor_names
        self._names: dict[str, int] = {}
        self._name_list: list[str] = []

    def find(self, windows: Sequence[Window]) -> list[Path]:
        """The critical path of every window."""
        walked = self._stretches(windows)
        local = walked.category == _LOCAL
        rows = np.flatnonzero(~local)
        some = walked.keep(rows)
        parts = [Pieces(some.start, some.end, some.category, some.name, rows, self._name_list)]
        of_rank = {
            rank: mine[local[mine]].astype(np.int32) for rank, mine in places_by_value(walked.rank)
        }
        of_rank = {rank: mine for rank, mine in of_rank.items() if len(mine)}
        spans = {rank: Spans(walked.start[m], walked.end[m]) for rank, m in of_rank.items()}
        for mine, described in zip(of_rank.values(), self._describe_ranks(spans), strict=True):
            codes = np.array([*map(self._code, described.names), NULL], dtype=np.int32)
            name, stretch = codes[described.name], mine[described.stretch]
            parts.append(replace(described, name=name, stretch=stretch, names=self._name_list))
        counts = np.zeros(len(windows), np.int64)
        for part in parts:
            counts += np.bincount(walked.window[part.stretch], minlength=len(windows))
        return [path for low, high in _groups(counts) for path in _paths(walked, parts, low, high)]

    def _stretches(self, windows: Sequence[Window]) -> _Stretches:
        """The stretches of all windows, one window after the other, in the order of time."""
        numbers = np.fromiter(
            (
                value
                for number, window in enumerate(windows)
                for stretch in self._walk(window)
                if stretch[2] > stretch[1]
                for value in (*stretch, number)
            ),
            np.int64,
        )
        rank, start, end, category, message, window = numbers.reshape(-1, 6).T
        name = np.full(len(message), NULL)
        waits = np.flatnonzero(message != NULL)
        name[waits] = [self._message_code(row) for row in message[waits].tolist()]
        found = _Stretches(rank, start, end, category, message, name, window)
        return found.keep(np.lexsort((start, window)))

    def _walk(self, window: Window) -> Iterator[_Stretch]:
        """Walks a window backward; stretches may be empty."""
        start, end, rank = window
        messages = self._joined.messages
        now = end
        seen: dict[int, int] = {}  # rank -> the earliest of its blocks that has been used
        while now > start:
            block_start, block_end, block_message = self._blocks(rank)
            block = int(np.searchsorted(block_start, now, side="left")) - 1
            if block >= 0 and block == seen.get(rank):
                # Back in the middle of a wait, whose message does not explain the rank's late
                # arrival.
                since = max(int(block_start[block]), start)
                yield _stretch(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            if block < 0 or block_end[block] <= start:
                yield _stretch(rank, start, now, _LOCAL)
                break
            seen[rank] = block
            until = min(int(block_end[block]), now)
            since = max(int(block_start[block]), start)
            yield _stretch(rank, until, now, _LOCAL)
            now = until
            if block_message[block] == NULL:
                yield _stretch(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            row = messages.offsets[rank] + int(block_message[block])
            released = int(self._joined.released[row])
            # It had not started when the walk came to this block from another message.
            if released == NULL_NS or released >= now:
                yield _stretch(rank, since, now, CATEGORY["wait"], row)
                now = since
                continue
            came = max(released, since)
            yield _stretch(rank, came, now, CATEGORY["transfer"], row)
            now = came
            if came > since:
                releaser = int(self._joined.releaser[row])
                rank, now = yield from self._through_queues(releaser, now, start)

    def _through_queues(
        self, rank: int, now: int, start: int
    ) -> Generator[_Stretch, None, tuple[int, int]]:
        """Continues the walk backward through the messages that occupied the queue of a message.

        Args:
            rank: The rank that came last to it.
            now: When.
            start: Where the path begins.

        Yields:
            The transfers of these messages.

        Returns:
            Where the walk continues: the last rank to arrive at the first of them, and when.
        """
        while now > start:
            row = self._queues.starting(rank, now)
            former = None if row is None else self._queues.former(row)
            if former is None:
                break
            released = int(self._joined.released[former])
            if released == NULL_NS or released >= now:
                break
            came = max(released, start)
            yield _stretch(rank, came, now, CATEGORY["transfer"], former)
            rank, now = int(self._joined.releaser[former]), came
        return rank, now

    def _message_code(self, row: int) -> int:
        """Returns a code for the description of a message: its operation and its tensors."""
        messages = self._joined.messages
        op, rank = messages.ops[messages.op[row]], int(messages.rank[row])
        count, first = int(messages.tensor_count[row]), int(messages.first_tensor[row])
        if not count:
            return self._code(op)
        name = self._tensor_names(rank).get(first, f"tensor {first}")
        return self._code(f"{op} {name}" if count == 1 else f"{op} {name} + {count - 1}")

    def _code(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = len(self._name_list)
            self._name_list.append(name)
        return self._names[name]


def _stretch(rank: int, start: int, end: int, category: int, message: int = NULL) -> _Stretch:
    return rank, start, end, category, message


def _paths(walked: _Stretches, parts: Sequence[Pieces], low: int, high: int) -> Iterator[Path]:
    """The paths of the windows from `low` to `high` - 1.

    Args:
        parts: All pieces, each part sorted by stretch.
        low, high: The windows.
    """
    first, last = np.searchsorted(walked.window, [low, high])
    some = []
    for part in parts:
        # Of the same type: otherwise the whole column is converted for each search.
        wanted = np.array([first, last], dtype=part.stretch.dtype)
        some.append(part.keep(slice(*np.searchsorted(part.stretch, wanted).tolist())))
    whole = Pieces.joined(some)
    whole = whole.keep(np.argsort(whole.stretch, kind="stable"))
    rank, message, window = (
        column[whole.stretch] for column in (walked.rank, walked.message, walked.window)
    )
    begins = np.flatnonzero(changes(window, rank, whole.category, whole.name, message))
    bounds = np.searchsorted(window[begins], np.arange(low, high + 1)).tolist()
    starts = whole.start[begins]
    ends = whole.end[np.append(begins[1:], len(whole))[: len(begins)] - 1]
    # There may be a piece for every event: 21 bytes each.
    rank, message = rank[begins].astype(np.int32), message[begins].astype(np.int32)
    category, name = whole.category[begins].astype(np.int8), whole.name[begins].astype(np.int32)
    for first, last in pairwise(bounds):
        yield Path(
            edge=np.append(starts[first:last], ends[last - 1 : last]),
            rank=rank[first:last],
            category=category[first:last],
            name=name[first:last],
            message=message[first:last],
            names=whole.names,
        )


def _groups(counts: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges with about `_PIECES_AT_ONCE` pieces: all at once would need much memory."""
    group = (np.cumsum(counts) - counts) // _PIECES_AT_ONCE
    yield from pairwise([*np.flatnonzero(changes(group)).tolist(), len(counts)])


def describe_stretches(line: Timeline, stretches: Spans, tensor_names: Mapping[int, str]) -> Pieces:
    """Cuts parts of a rank's time along its timeline, and names every piece.

    Backward is divided where gradients became ready; a part of it is named after the last one.

    Args:
        stretches: The parts, ascending.
        tensor_names: The rank's names of tensors by id.
    """
    names, ready = list(line.names), np.empty(0, np.int64)
    if line.backward != NULL and len(line.gradient_time):
        ready = line.gradient_time
        ids, which = np.unique(line.gradient_tensor, return_inverse=True)
        tensors = np.append(len(names) + which, NULL)
        names += [f"{tensor_names.get(each, f'tensor {each}')}.grad" for each in ids.tolist()]
    times, gaps = np.append(ready, _LAST), divided_at(distinct(ready))
    time, category, name = line.segments
    segments = Spans(time, np.append(time[1:], _LAST))
    found = []
    for low, high in _groups(touched(stretches, segments)[1]):
        some = Spans(stretches.start[low:high], stretches.end[low:high])
        stretch, segment, spans = overlaps(some, segments)
        called = name[segment]
        if len(ready):
            piece, _, spans = overlaps(spans, gaps)
            stretch, segment, called = stretch[piece], segment[piece], called[piece]
            made = np.searchsorted(ready, spans.end)
            is_made = (called == line.backward) & (times[made] == spans.end)
            called = np.where(is_made, tensors[made], called)
        found.append(
            Pieces(
                *spans,
                category=category[segment],
                name=called.astype(np.int32),
                stretch=(low + stretch).astype(np.int32),
                names=names,
            )
        )
    return Pieces.joined(found)
