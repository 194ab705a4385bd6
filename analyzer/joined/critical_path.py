"""The critical path of a step over all ranks.

The walk goes backward from the latest end in the step. On a rank, it follows the order of the
rank's work. If the rank was blocked on a collective, the walk continues on the last rank to arrive,
at a receive on the sender, at the arrival time of that rank; the time after it is transfer.
If all ranks had arrived before the rank began to wait, the whole wait is transfer and the walk
continues before it on the same rank. If a rank arrived late because its queue was busy, the walk
continues in the message that occupied the queue, see `queues.py`. So every instant between the
step's earliest start and latest end belongs to exactly one piece, and the pieces sum to the step's
wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    Gathered,
    IntArray,
    distinct,
)
from ddltrace.analyzer.events.rank_timeline import CATEGORIES, CATEGORY, Timeline
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.queues import Queues

_PIECES_AT_ONCE = 1 << 16
_LOCAL = -1
"""Category of a stretch that follows the rank's own timeline."""


Blocks = tuple[IntArray, IntArray, IntArray]


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
class Pieces:
    """Pieces of several paths; `window` is the index of the path of each piece."""

    start: IntArray
    end: IntArray
    rank: IntArray
    category: IntArray
    name: IntArray
    message: IntArray
    window: IntArray

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, IntArray]:
        """All columns by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def keep(self, rows: IntArray | BoolArray) -> Pieces:
        """Some of them, in the order given."""
        return Pieces(**{name: column[rows] for name, column in self.columns().items()})

    @staticmethod
    def joined(parts: Sequence[Pieces]) -> Pieces:
        """All pieces of some parts, one part after the other."""
        each = [part.columns() for part in parts]
        return Pieces(**{name: np.concatenate([own[name] for own in each]) for name in each[0]})

    def merged(self) -> Pieces:
        """Returns the pieces with consecutive equal pieces merged."""
        new = np.zeros(len(self), dtype=bool)
        new[:1] = True
        for column in (self.window, self.rank, self.category, self.name, self.message):
            new[1:] |= column[1:] != column[:-1]
        begins = np.flatnonzero(new)
        ends = self.end[np.append(begins[1:], len(new))[: len(begins)] - 1]
        return replace(self.keep(begins), end=ends)


@dataclass
class _Stretches:
    """Stretches that walks collect, in plain lists, because they are appended one by one."""

    rank: list[int]
    start: list[int]
    end: list[int]
    category: list[int]
    message: list[int]
    windows: list[int]
    window: int = 0

    def add(self, rank: int, start: int, end: int, category: int, message: int = NULL) -> None:
        if end > start:
            self.rank.append(rank)
            self.start.append(start)
            self.end.append(end)
            self.category.append(category)
            self.message.append(message)
            self.windows.append(self.window)

    def pieces(self) -> Pieces:
        """The same as columns, without names."""
        columns = (self.start, self.end, self.rank, self.category, self.message, self.windows)
        start, end, rank, category, message, window = (
            np.array(column, dtype=np.int64) for column in columns
        )
        name = np.full(len(start), NULL)
        return Pieces(start, end, rank, category, name, message, window)


class PathFinder:
    """Finds critical paths.

    Walks the windows first, for which the blocks of the ranks suffice; then describes the stretches
    of every rank that the paths visit along its timeline, one rank at a time.

    Args:
        joined: All messages.
        blocks: Gives a rank's blocks, see `Timeline`: start, end and message of each.
        describe: Describes stretches of ranks, see `describe_stretches`; the results have the order
            of the ranks.
        tensor_names: Gives a rank's names of tensors by id.
    """

    def __init__(
        self,
        joined: Joined,
        blocks: Callable[[int], Blocks],
        describe: Callable[[Mapping[int, Pieces]], Iterable[RankPieces]],
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
        found = _Stretches([], [], [], [], [], [])
        for number, window in enumerate(windows):
            self._walk(window, number, found)
        walked = found.pieces()
        blocked = np.flatnonzero(walked.message != NULL)
        walked.name[blocked] = [self._message_code(row) for row in walked.message[blocked].tolist()]
        local = walked.category == _LOCAL
        parts = [walked.keep(~local)]
        by_rank = {
            rank: walked.keep(local & (walked.rank == rank))
            for rank in distinct(walked.rank[local]).tolist()
        }
        for rank, described in zip(by_rank, self._describe_ranks(by_rank), strict=True):
            codes = np.array([*map(self._code, described.names), NULL], dtype=np.int32)
            parts.append(replace(described.pieces(rank), name=codes[described.name]))
        # A path ends where the next one begins, so each part is sorted by window.
        counts = sum(np.bincount(part.window, minlength=len(windows)) for part in parts)
        paths: list[Path] = []
        for low, high in _groups(np.asarray(counts)):
            paths += self._some_paths(parts, low, high)
        return paths

    def _some_paths(self, parts: Sequence[Pieces], low: int, high: int) -> Iterator[Path]:
        """The paths of the windows from `low` to `high` - 1."""
        some = []
        for part in parts:
            # Of the same type: otherwise the whole column is converted for each search.
            wanted = np.array([low, high], dtype=part.window.dtype)
            some.append(part.keep(np.arange(*np.searchsorted(part.window, wanted).tolist())))
        whole = Pieces.joined(some)
        whole = whole.keep(np.lexsort((whole.start, whole.window))).merged()
        bounds = np.searchsorted(whole.window, np.arange(low, high + 1)).tolist()
        # There may be a piece for every event: 21 bytes each.
        rank, message = whole.rank.astype(np.int32), whole.message.astype(np.int32)
        category, name = whole.category.astype(np.int8), whole.name.astype(np.int32)
        for first, last in pairwise(bounds):
            yield Path(
                edge=np.append(whole.start[first:last], whole.end[last - 1 : last]),
                rank=rank[first:last],
                category=category[first:last],
                name=name[first:last],
                message=message[first:last],
                names=self._name_list,
            )

    def _walk(self, window: Window, number: int, found: _Stretches) -> None:
        start, end, rank = window
        found.window = number
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
                found.add(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            if block < 0 or block_end[block] <= start:
                found.add(rank, start, now, _LOCAL)
                break
            seen[rank] = block
            until = min(int(block_end[block]), now)
            since = max(int(block_start[block]), start)
            found.add(rank, until, now, _LOCAL)
            now = until
            if block_message[block] == NULL:
                found.add(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            row = messages.offsets[rank] + int(block_message[block])
            released = int(self._joined.released[row])
            # It had not started when the walk came to this block from another message.
            if released == NULL_NS or released >= now:
                found.add(rank, since, now, CATEGORY["wait"], row)
                now = since
                continue
            came = max(released, since)
            found.add(rank, came, now, CATEGORY["transfer"], row)
            now = came
            if came > since:
                rank, now = self._through_queues(int(self._joined.releaser[row]), now, start, found)

    def _through_queues(
        self, rank: int, now: int, start: int, found: _Stretches
    ) -> tuple[int, int]:
        """Continues the walk backward through the messages that occupied the queue of a message.

        Args:
            rank: The rank that came last to it.
            now: When.
            start: Where the path begins.
            found: Receives the stretches.

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
            found.add(rank, came, now, CATEGORY["transfer"], former)
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


def _groups(counts: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of windows with about `_PIECES_AT_ONCE` pieces: all at once would need much memory."""
    group = (np.cumsum(counts) - counts) // _PIECES_AT_ONCE
    borders = np.flatnonzero(np.append(True, group[1:] != group[:-1]))[: len(counts)]
    yield from pairwise([*borders.tolist(), len(counts)])


@dataclass(frozen=True)
class RankPieces:
    """Pieces of one rank's timeline, in few bytes each; columns as in `Pieces`.

    Attributes:
        name: Index into `names`; `NULL` for none.
        names: Names of the rank.
    """

    start: IntArray
    end: IntArray
    category: IntArray
    name: IntArray
    window: IntArray
    names: list[str]

    def pieces(self, rank: int) -> Pieces:
        """The same as `Pieces`; rank and message take no memory."""
        count = len(self.start)
        return Pieces(
            start=self.start,
            end=self.end,
            rank=np.broadcast_to(np.int64(rank), count),
            category=self.category,
            name=self.name,
            message=np.broadcast_to(np.int64(NULL), count),
            window=self.window,
        )


def describe_stretches(
    line: Timeline, stretches: Pieces, tensor_names: Mapping[int, str]
) -> RankPieces:
    """Cuts stretches of a rank along its timeline, and names every piece.

    Args:
        line: The timeline.
        stretches: The stretches, which are sorted by window.
        tensor_names: The rank's names of tensors by id.
    """
    order = np.lexsort((stretches.start, stretches.window))
    stretches = stretches.keep(order)
    tensors, names = np.empty(0, np.int64), list(line.names)
    if line.backward != NULL and len(line.gradient_time):
        ids, which = np.unique(line.gradient_tensor, return_inverse=True)
        labels = [tensor_names.get(number, f"tensor {number}") for number in ids.tolist()]
        tensors = len(names) + which
        names += [f"{label}.grad" for label in labels]
    counts = _segment_counts(line, stretches)
    # There may be a piece for every event, so the large columns are kept only as long as needed.
    start, end, window = Gathered(np.int64), Gathered(np.int64), Gathered(np.int32)
    category, name = Gathered(np.int8), Gathered(np.int32)
    for low, high in _groups(counts):
        pieces = _local(line, stretches.keep(np.arange(low, high)), tensors)
        start.add(pieces.start)
        end.add(pieces.end)
        category.add(pieces.category)
        name.add(pieces.name)
        window.add(pieces.window)
    return RankPieces(
        start=start.take_values(),
        end=end.take_values(),
        category=category.take_values(),
        name=name.take_values(),
        window=window.take_values(),
        names=names,
    )


def _segment_counts(line: Timeline, stretches: Pieces) -> IntArray:
    first = np.searchsorted(line.segments.time, stretches.start, side="right") - 1
    last = np.searchsorted(line.segments.time, stretches.end, side="left")
    return np.asarray(last - first)


def _local(line: Timeline, stretches: Pieces, tensors: IntArray) -> Pieces:
    """Pieces of a rank's timeline within stretches of it."""
    time = line.segments.time
    first = np.searchsorted(time, stretches.start, side="right") - 1
    counts = _segment_counts(line, stretches)
    which = np.repeat(np.arange(len(counts)), counts)
    segment = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    pieces = stretches.keep(which)
    following = time[np.minimum(segment + 1, len(time) - 1)]
    unbounded = segment == len(time) - 1
    name = line.segments.name[segment]
    pieces = replace(
        pieces,
        start=np.maximum(time[segment], pieces.start),
        end=np.where(unbounded, pieces.end, np.minimum(following, pieces.end)),
        category=line.segments.category[segment].astype(np.int64),
        name=name.astype(np.int64),
    )
    if not len(tensors):
        return pieces
    return _split_backward(line, pieces, name == line.backward, tensors)


def _split_backward(
    line: Timeline, pieces: Pieces, backward: BoolArray, tensors: IntArray
) -> Pieces:
    """Divides backward where gradients became ready; a part is named after its last one."""
    times = line.gradient_time
    low = np.searchsorted(times, pieces.start, side="right")
    high = np.searchsorted(times, pieces.end, side="left")
    cuts = np.where(backward, np.maximum(high - low, 0), 0)
    which = np.repeat(np.arange(len(cuts)), cuts + 1)
    place = np.arange(len(which)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)
    # Part k of a piece lies between gradients low + k - 1 and low + k, within the piece.
    following = low[which] + place
    former = times[np.maximum(following - 1, 0)]
    next_one = np.minimum(following, len(times) - 1)
    begins = np.where(place == 0, pieces.start[which], former)
    ends = np.where(place == cuts[which], pieces.end[which], times[next_one])
    made = backward[which] & (following < len(times)) & (times[next_one] == ends)
    name = np.where(made, tensors[next_one], pieces.name[which])
    parts = replace(pieces.keep(which), start=begins, end=ends, name=name)
    return parts.keep(ends > begins)
