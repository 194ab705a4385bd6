"""The events of one rank as the columns that the timeline draws.

Events are read in windows of some ten thousand, and of each window only a few narrow columns are
kept: a rank with millions of events takes about 40 bytes per event while it is arranged. Events are
numbered as in `Trace.events`: by start, in the order of recording where starts are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, Columns, Gathered, numbers_of
from ddltrace.analyzer.events.rank_activity import Activity, ActivityBuilder
from ddltrace.analyzer.events.rank_messages import read_messages, read_waits
from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.analyzer.joined.nccl_events import windows_with_nccl
from ddltrace.dashboard.timeline.event_index import EventIndex
from ddltrace.dashboard.timeline.lod import I64
from ddltrace.tracer.trace.schema import EVENTS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

I32 = npt.NDArray[np.int32]

_SMALL_KINDS: Final = ("message", "wait", "step", "phase")
_CODED: Final = ("kind", "lane", "name")
_PLACE: Final = "place"


@dataclass(frozen=True)
class RankEvents:
    """One rank's events, by start; codes are -1 for null.

    Attributes:
        rank: Global rank.
        start: Starts in ns, on rank 0's clock.
        end: Ends in ns; `NULL_NS` where the end is not known.
        kind: Code of each event's kind in `words["kind"]`.
        lane: Code of each event's lane in `words["lane"]`.
        name: Code of each event's name in `words["name"]`.
        words: Column -> the strings that its codes index.
        steps: Events of kind ``step``, ascending, and the number of each one's step.
        first_tensor: Id of the first tensor of each gradient; -1 for all others.
        index: The columns that clicks and searches need.
        activity: The rank's activity.
    """

    rank: int
    start: I64
    end: I64
    kind: I32
    lane: I32
    name: I32
    words: dict[str, list[str]]
    steps: tuple[I32, I32]
    first_tensor: I32
    index: EventIndex
    activity: Activity


def read_rank(trace: Trace, rank: int) -> RankEvents:
    """Reads one rank's events.

    Raises:
        TraceError: The trace has nothing of that rank.
    """
    return gather(windows_with_nccl(trace, rank), rank)


def gather(tables: Iterable[pa.Table], rank: int) -> RankEvents:
    """The events of one rank.

    Args:
        tables: Windows of schema `EVENTS` in the order of recording.
    """
    gathering = _Gathering()
    for table in tables:
        gathering.add(table)
    return gathering.finish(rank)


class _Gathering:
    """Columns of the windows read so far, in the order of recording."""

    def __init__(self) -> None:
        self._start, self._end = Gathered(np.int64), Gathered(np.int64)
        self._codes = {name: Gathered(np.int32) for name in _CODED}
        self._numbers: dict[str, dict[str, int]] = {name: {} for name in _CODED}
        self._steps: list[tuple[I64, I32]] = []
        self._first_tensor = Gathered(np.int32)
        self._tensors: list[pa.Array] = []
        self._small: list[pa.Table] = []
        self._activity = ActivityBuilder()
        self._count = 0

    def add(self, table: pa.Table) -> None:
        """Adds a window of schema `EVENTS`."""
        if not table.num_rows:
            return
        table = table.combine_chunks()
        self._start.add(numbers_of(table["start_ns"].chunk(0), NULL_NS))
        self._end.add(numbers_of(table["end_ns"].chunk(0), NULL_NS))
        for name in _CODED:
            self._codes[name].add(self._recoded(name, table[name].chunk(0)))
        tensors = table["tensors"].chunk(0)
        self._tensors.append(tensors)
        of_kind = {code: word for word, code in self._numbers["kind"].items()}
        kind = self._codes["kind"].values()[self._count :]
        words = np.array([of_kind[code] for code in range(len(of_kind))], dtype=object)
        steps = np.flatnonzero(np.isin(kind, np.flatnonzero(words == "step")))
        numbers = numbers_of(table["step"].chunk(0), NULL)[steps].astype(np.int32)
        self._steps.append((steps + self._count, numbers))
        self._first_tensor.add(
            _first_items(tensors, np.isin(kind, np.flatnonzero(words == "gradient")))
        )
        small = np.isin(kind, [code for code, word in of_kind.items() if word in _SMALL_KINDS])
        rows = np.flatnonzero(small)
        places = pa.array(rows + self._count, pa.int64())
        self._small.append(table.take(pa.array(rows)).append_column(_PLACE, places))
        self._activity.add(Columns(table))
        self._count += table.num_rows

    def _recoded(self, name: str, column: pa.DictionaryArray) -> I32:
        """A window's codes as codes of all windows."""
        numbers = self._numbers[name]
        words = [word or "" for word in column.dictionary.to_pylist()]
        code = np.array([*(numbers.setdefault(w, len(numbers)) for w in words), NULL], np.int32)
        recoded: I32 = code[numbers_of(column.indices, NULL)]
        return recoded

    def finish(self, rank: int) -> RankEvents:
        """Returns the events of all windows, by start."""
        empty = EVENTS.empty_table().append_column(_PLACE, pa.array([], pa.int64()))
        small = pa.concat_tables([empty, *self._small]).unify_dictionaries().combine_chunks()
        self._small = []
        kept = drop_superseded(small)
        order = _order(self._start.values(), _places(small), _places(kept))
        number = None
        if order is not None:
            number = np.full(self._count, NULL, dtype=np.int32)
            number[order] = np.arange(len(order), dtype=np.int32)
        columns = Columns(kept.drop_columns([_PLACE]))
        messages = read_messages(columns)
        tensors = pa.concat_arrays(self._tensors) if self._tensors else pa.array([], _LISTS)
        self._tensors = []
        index = EventIndex(
            messages=_of_kind(kept, "message", number),
            waits=_of_kind(kept, "wait", number).select(("start_ns", "end_ns", "parent")),
            tensors=tensors if order is None else tensors.take(pa.array(order)),
            recorded=order,
        )

        def sorted_(column: Gathered) -> npt.NDArray[Any]:
            values = column.take_values()
            return values if order is None else values[order]

        activity = self._activity.finish(messages, read_waits(columns, messages))
        return RankEvents(
            rank=rank,
            start=sorted_(self._start),
            end=sorted_(self._end),
            **{name: sorted_(self._codes[name]) for name in _CODED},
            words={name: list(numbers) for name, numbers in self._numbers.items()},
            steps=self._numbered_steps(number),
            first_tensor=sorted_(self._first_tensor),
            index=index,
            activity=activity,
        )

    def _numbered_steps(self, number: I32 | None) -> tuple[I32, I32]:
        """The steps by event number.

        Args:
            number: Event number of each position; -1 for superseded rows. None if positions equal
                numbers.
        """
        if not self._steps:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        place = np.concatenate([places for places, _ in self._steps])
        step = np.concatenate([numbers for _, numbers in self._steps])
        events = place.astype(np.int32) if number is None else number[place]
        by_event = np.argsort(events, kind="stable")
        by_event = by_event[events[by_event] >= 0]
        return events[by_event], step[by_event]


_LISTS: Final = EVENTS.field("tensors").type


def _places(table: pa.Table) -> I64:
    places: I64 = table[_PLACE].combine_chunks().to_numpy(zero_copy_only=False)
    return places


def _order(start: I64, small: I64, kept: I64) -> I32 | None:
    """Places of the events by start, without superseded rows; None if recorded in that order."""
    dropped = np.setdiff1d(small, kept)
    if not len(dropped):
        if bool(np.all(start[1:] >= start[:-1])):
            return None
        return np.argsort(start, kind="stable").astype(np.int32)
    keep = np.ones(len(start), dtype=bool)
    keep[dropped] = False
    places = np.flatnonzero(keep)
    return places[np.argsort(start[places], kind="stable")].astype(np.int32)


def _of_kind(kept: pa.Table, kind: str, number: I32 | None) -> pa.Table:
    """The rows of a kind by event number, which is added as column ``event``."""
    codes = kept["kind"].combine_chunks()
    wanted = np.array([*(word == kind for word in codes.dictionary.to_pylist()), False])
    rows = np.flatnonzero(wanted[numbers_of(codes.indices, NULL)])
    events = _places(kept)[rows]
    if number is not None:
        events = number[events].astype(np.int64)
    by_number = np.argsort(events, kind="stable")
    table = kept.drop_columns([_PLACE]).take(pa.array(rows[by_number]))
    column = pa.array(events[by_number], pa.uint64())
    return table.append_column("event", column).combine_chunks()


def _first_items(lists: pa.ListArray, wanted: npt.NDArray[np.bool_]) -> I32:
    """The first item of each of the wanted lists; -1 for all others and for empty lists."""
    offsets = np.asarray(lists.offsets)
    first = np.full(len(lists), NULL, dtype=np.int32)
    rows = np.flatnonzero(wanted & (offsets[1:] > offsets[:-1]))
    if len(rows):
        first[rows] = numbers_of(lists.values, NULL)[offsets[rows]]
    return first
