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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, IntArray
from ddltrace.analyzer.events.rank_timeline import CATEGORY, Timeline
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.queues import Queues
from ddltrace.analyzer.model import CATEGORIES

_WINDOWS_AT_ONCE = 128
_PIECES_AT_ONCE = 1 << 18
_LOCAL = -1
"""Category of a stretch that follows the rank's own timeline."""


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
    """Finds critical paths, and loads the timelines of the ranks that they visit.

    Args:
        joined: All messages.
        timeline: Gives a rank's timeline.
        tensor_names: Gives a rank's names of tensors by id.
    """

    def __init__(
        self,
        joined: Joined,
        timeline: Callable[[int], Timeline],
        tensor_names: Callable[[int], dict[int, str]],
    ) -> None:
        self._joined = joined
        self._queues = Queues(joined)
        self._timeline = timeline
        self._tensor_names = tensor_names
        self._names: dict[str, int] = {}
        self._name_list: list[str] = []
        self._codes: dict[int, IntArray] = {}
        self._tensors: dict[int, IntArray] = {}

    def find(self, windows: Sequence[Window]) -> list[Path]:
        """The critical path of every window.

        Windows are walked one by one and described many at a time, so that describing them
        costs little each, and what it needs at a time is bounded.
        """
        paths: list[Path] = []
        at_once = self._windows_at_once(windows)
        for first in range(0, len(windows), at_once):
            some = windows[first : first + at_once]
            found = _Stretches([], [], [], [], [], [])
            for number, window in enumerate(some):
                self._walk(window, number, found)
            paths += self._describe(found, len(some))
        return paths

    def _windows_at_once(self, windows: Sequence[Window]) -> int:
        """Number of windows whose pieces fit in memory at once."""
        if not windows:
            return 1
        segments = len(self._timeline(windows[0].last_rank).segments.time)
        return min(1 + _PIECES_AT_ONCE * len(windows) // segments, _WINDOWS_AT_ONCE)

    def _walk(self, window: Window, number: int, found: _Stretches) -> None:
        start, end, rank = window
        found.window = number
        messages = self._joined.messages
        now = end
        seen: dict[int, int] = {}  # rank -> the earliest of its blocks that has been used
        while now > start:
            line = self._timeline(rank)
            block = int(np.searchsorted(line.block_start, now, side="left")) - 1
            if block >= 0 and block == seen.get(rank):
                # Back in the middle of a wait, whose message does not explain the rank's late
                # arrival.
                since = max(int(line.block_start[block]), start)
                found.add(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            if block < 0 or line.block_end[block] <= start:
                found.add(rank, start, now, _LOCAL)
                break
            seen[rank] = block
            until = min(int(line.block_end[block]), now)
            since = max(int(line.block_start[block]), start)
            found.add(rank, until, now, _LOCAL)
            now = until
            if line.block_message[block] == NULL:
                found.add(rank, since, now, CATEGORY["wait"])
                now = since
                continue
            row = messages.offsets[rank] + int(line.block_message[block])
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

    def _describe(self, found: _Stretches, windows: int) -> list[Path]:
        """Cuts local stretches along their rank's timeline and names every piece."""
        walked = found.pieces()
        blocked = np.flatnonzero(walked.message != NULL)
        walked.name[blocked] = [self._message_code(row) for row in walked.message[blocked].tolist()]
        local = walked.category == _LOCAL
        parts = [walked.keep(~local)]
        for rank in np.unique(walked.rank[local]).tolist():
            line = self._timeline(rank)
            parts.append(self._local(line, walked.keep(local & (walked.rank == rank))))
        whole = Pieces.joined(parts)
        whole = whole.keep(np.lexsort((whole.start, whole.window))).merged()
        bounds = np.searchsorted(whole.window, np.arange(windows + 1)).tolist()
        # There may be a piece for every event: 21 bytes each.
        rank, message = whole.rank.astype(np.int32), whole.message.astype(np.int32)
        category, name = whole.category.astype(np.int8), whole.name.astype(np.int32)
        return [
            Path(
                edge=np.append(whole.start[low:high], whole.end[high - 1 : high]),
                rank=rank[low:high],
                category=category[low:high],
                name=name[low:high],
                message=message[low:high],
                names=self._name_list,
            )
            for low, high in pairwise(bounds)
        ]

    def _local(self, line: Timeline, stretches: Pieces) -> Pieces:
        """Pieces of a rank's timeline within stretches of it."""
        time = line.segments.time
        first = np.searchsorted(time, stretches.start, side="right") - 1
        last = np.searchsorted(time, stretches.end, side="left")
        counts = last - first
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
            name=self._rank_codes(line)[name],
        )
        return self._split_backward(line, pieces, name == line.backward)

    def _split_backward(self, line: Timeline, pieces: Pieces, backward: BoolArray) -> Pieces:
        """Divides backward where gradients became ready; a part is named after its last one."""
        times = line.gradient_time
        if line.backward == NULL or not len(times):
            return pieces
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
        tensor = self._tensor_codes(line)[next_one]
        name = np.where(made, tensor, pieces.name[which])
        parts = replace(pieces.keep(which), start=begins, end=ends, name=name)
        return parts.keep(ends > begins)

    def _rank_codes(self, line: Timeline) -> IntArray:
        """The paths' code of each of a rank's names; of `NULL`, which indexes the last: `NULL`."""
        if line.rank not in self._codes:
            codes = [self._code(name) for name in line.names]
            self._codes[line.rank] = np.array([*codes, NULL])
        return self._codes[line.rank]

    def _tensor_codes(self, line: Timeline) -> IntArray:
        """The paths' code of the tensor of each of a rank's gradients."""
        if line.rank not in self._tensors:
            names = self._tensor_names(line.rank)
            ids, which = np.unique(line.gradient_tensor, return_inverse=True)
            labels = [names.get(number, f"tensor {number}") for number in ids.tolist()]
            codes = [self._code(f"{label}.grad") for label in labels]
            self._tensors[line.rank] = np.array(codes)[which]
        return self._tensors[line.rank]

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
