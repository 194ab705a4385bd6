"""The life of every parameter's gradient: ready, enqueued, in flight, complete, exposed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    FloatArray,
    Gathered,
    IntArray,
    distinct,
    place_in,
    ranges,
)
from ddltrace.analyzer.events.interval_sets import Spans, lengths_within, subtract
from ddltrace.analyzer.events.rank_messages import Messages, Waits
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.measures.keyed_sums import KeyedSums
from ddltrace.analyzer.measures.measure import MAX_PERIODS, JoinedSteps, Measure, derived
from ddltrace.analyzer.measures.steps import Steps, in_steps

if TYPE_CHECKING:
    pass

_BLOCK: Final = 1 << 16
_VALUE_BITS: Final = 44
_CODE_BITS: Final = 32
_SPREADING: Final = frozenset({"all_gather", "broadcast"})
"""Operations that count as carriers of a gradient only if no other one does, e.g. compressed."""

_OF_LAST: Final = frozenset({"complete", "waited", "updated"})
"""Times of the last message that carries a gradient; the others are of the first one."""

_LIMIT: Final = 1 << (_VALUE_BITS - 1)
"""Times from the start of a step are kept within 2.4 hours; there may be 500,000 tensors."""


@dataclass(frozen=True)
class TensorRow:
    """Times of a parameter's gradient, from ready to updated, medians over ranks and steady steps.

    Times are from the start of the step on its rank.

    Attributes:
        name: The parameter.
        bytes: Size of its gradient.
        ready_us: When the last backward pass of the step has accumulated the gradient.
        enqueue_us: When the first message that carries the gradient is enqueued.
        start_us: When that message starts.
        complete_us: When the last message that carries the gradient has completed.
        waited_us: When the host continues after waiting for that message: the end of the wait for
            the message or, if there is none, of the first wait that ends after the message and is
            for a message that was enqueued later.
        updated_us: End of the first optimizer phase (on a device: of the optimizer's kernels) that
            ends after that message, in the same step.
        exposed_us: Its share of the exposed communication of a step, mean per rank and step:
            each exposed instant is shared equally by the messages in flight, a message's part
            by its tensors in proportion to their bytes.
        messages: Number of messages that carried the parameter or its gradient, per step and rank.
        bucket: Number of tensors in the message of its gradient (median).
    """

    name: str
    bytes: int
    ready_us: float | None
    enqueue_us: float | None
    start_us: float | None
    complete_us: float | None
    exposed_us: float | None
    messages: float
    bucket: int | None
    waited_us: float | None = None
    updated_us: float | None = None


def exposed_parts(messages: Messages, exposed: Spans) -> FloatArray:
    """Returns each message's part of its rank's exposed communication, ns.

    Every exposed instant is shared equally by the messages in flight at it, so the parts of
    all messages sum to the whole.
    """
    counted = np.flatnonzero(messages.in_flight & messages.closed)
    parts = np.zeros(len(messages))
    if not len(counted):
        return parts
    start, end = messages.start[counted], messages.end[counted]
    time = distinct(np.concatenate([start, end]))
    opened = np.searchsorted(np.sort(start), time, side="right")
    ended = np.searchsorted(np.sort(end), time, side="right")
    flying = np.maximum(opened - ended, 1)[:-1]
    per_message = lengths_within(exposed, time[:-1], time[1:]) / flying
    sums = np.append(0.0, np.cumsum(per_message))
    parts[counted] = sums[np.searchsorted(time, end)] - sums[np.searchsorted(time, start)]
    return parts


def waits_end(messages: Messages, waits: Waits) -> IntArray:
    """When the host went on after waiting for each message, ns; `NULL_NS` if it did not wait.

    A wait that names no message, such as DistributedDataParallel's at the end of backward, is for
    the last message to complete, and so for those that were handed over before that one.
    """
    found = np.full(len(messages), NULL_NS)
    known = np.flatnonzero(waits.message != NULL)
    if not len(known):
        return found
    order = known[np.argsort(waits.end[known], kind="stable")]
    at = np.searchsorted(waits.end[order], messages.end)
    inside = np.flatnonzero(messages.closed & (at < len(order)))
    wait = order[at[inside]]
    later = messages.enqueue[waits.message[wait]] >= messages.enqueue[inside]
    found[inside[later]] = waits.end[wait[later]]
    found[waits.message[order]] = waits.end[order]  # the last wait for it
    return found


def updates_end(scan: RankScan) -> IntArray:
    """When the optimizer had run after each message completed, in the step of the message, ns.

    `NULL_NS` where that is not known.
    """
    messages, activity = scan.messages, scan.activity
    updates = activity.device_update if len(activity.device_update.start) else activity.update
    found = np.full(len(messages), NULL_NS)
    place = place_in(messages.step, scan.step)
    at = np.searchsorted(updates.end, messages.end)
    rows = np.flatnonzero(messages.closed & (place != NULL) & (at < len(updates.end)))
    rows = rows[updates.start[at[rows]] < scan.step_end[place[rows]]]
    found[rows] = updates.end[at[rows]]
    return found


class TensorTimes(NamedTuple):
    """Times of all parameters.

    Attributes:
        rows: One row per parameter, most exposed first.
        course: Name -> exposed communication, microseconds per rank and step, in each period of
            the run, in order.
        rank_steps: Number of steps of all ranks in each period.
    """

    rows: tuple[TensorRow, ...]
    course: dict[str, FloatArray]
    rank_steps: IntArray


def find_tensors(joined: JoinedSteps) -> TensorTimes:
    """Measures every parameter in the steady steps, and its exposed time over the run."""
    steady = joined.steady
    codes: dict[str, int] = {}
    sizes: list[int] = []
    parts: list[_Part] = []
    ready = Gathered(np.int64)
    for rank, scan in joined.scans.items():
        infos = joined.trace.tensors(rank)
        if not infos:
            continue
        for info in infos:
            if info.name not in codes:
                codes[info.name] = len(sizes)
                sizes.append(info.bytes)
        table = _Table(
            np.array([info.id for info in infos] + [NULL]),
            np.array([codes[info.name] for info in infos] + [NULL], dtype=np.int32),
            np.array([max(info.bytes, 0) for info in infos] + [0], dtype=np.float64),
        )
        part = _Part.of(scan, table, steady)
        ready.add(part.take_ready())
        parts.append(part)
    ready_at = _medians_of(ready.take_values(), len(sizes))
    # One after the other: each takes eight bytes for every tensor of every message.
    medians = {
        name: _medians((keys for part in parts for keys in part.times_of(name)), len(sizes))
        for name in ("enqueue", "start", "complete", "waited", "updated", "bucket")
    }
    periods = min(joined.most_periods, max(len(steady), 1))
    sums, count = np.zeros((periods, len(sizes))), np.zeros(len(sizes), dtype=np.int64)
    rank_steps = np.zeros(periods, dtype=np.int64)
    for part in parts:
        period = np.searchsorted(steady, part.numbers) * periods // max(len(steady), 1)
        part.add_exposed(sums, count, period)
        rank_steps += np.bincount(period, minlength=periods)
    total = max(int(rank_steps.sum()), 1)
    rows = [
        TensorRow(
            name=name,
            bytes=sizes[i],
            ready_us=_us(ready_at[i]),
            enqueue_us=_us(medians["enqueue"][i]),
            start_us=_us(medians["start"][i]),
            complete_us=_us(medians["complete"][i]),
            exposed_us=_us(float(sums[:, i].sum()) / total) if count[i] else None,
            messages=float(count[i]) / total,
            bucket=None if np.isnan(medians["bucket"][i]) else int(medians["bucket"][i]),
            waited_us=_us(medians["waited"][i]),
            updated_us=_us(medians["updated"][i]),
        )
        for name, i in codes.items()
    ]
    seen = rank_steps > 0
    course = sums[seen] / rank_steps[seen, None] / 1e3
    return TensorTimes(
        rows=sorted_rows(rows),
        course={name: course[:, i] for name, i in codes.items() if count[i]},
        rank_steps=rank_steps[seen],
    )


def sorted_rows(rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Rows of parameters, most exposed first."""
    return tuple(sorted(rows, key=lambda row: (-(row.exposed_us or 0.0), -row.bytes)))


class _Table:
    """A rank's tensors: the last entry represents ids without a name."""

    def __init__(self, ids: IntArray, codes: IntArray, sizes: IntArray) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._ids, self._codes, self._sizes = ids, codes, sizes

    def codes(self, tensor: IntArray) -> IntArray:
        """Code of each tensor, 32 bits; `NULL` for a tensor without a name."""
        return np.asarray(self._codes[self._find(tensor)])

    def bytes(self, tensor: IntArray) -> FloatArray:
        """Size of each tensor."""
        return np.asarray(self._sizes[self._find(tensor)])

    def _find(self, tensor: IntArray) -> IntArray:
        place = place_in(tensor, self._ids[self._order])
        return np.where(place != NULL, self._order[place], len(self._ids) - 1)


class _Gradients:
    """When one rank's gradients were finally ready in each step, and the messages that carry them.

    A parameter is carried by messages that have nothing to do with its gradient, too: FSDP gathers
    it before each forward and backward pass, ZeRO after the update. And several backward passes
    may add to a gradient, of which only the last one's is sent. So a gradient's messages are those
    after it was last ready: reductions, if there are any. If there are none, the job sent it
    before it was added up (by a hook of the tensor's); then it is the last reduction.

    Args:
        table: Its tensors.
        numbers: Its steps that count.

    Attributes:
        first: For every tensor of every message that `find_messages` was given: whether this is
            the first message that carries the tensor's gradient in its step. If a tensor's
            gradients were not recorded, every message that carries it is.
        last: The same of the last message.
    """

    def __init__(self, scan: RankScan, table: _Table, numbers: IntArray) -> None:
        self._scan, self._numbers = scan, numbers
        place = place_in(scan.gradient_step, numbers)
        keys = _pairs(place, table.codes(scan.gradient_tensor))
        known = np.flatnonzero(keys >= 0)
        order = known[np.argsort(keys[known], kind="stable")]
        newest = order[np.append(np.diff(keys[order]) != 0, True)] if len(order) else order
        self._keys, self._time = keys[newest], scan.gradient_time[newest]
        self._is_sent = np.zeros(len(newest), dtype=bool)
        self.first = self.last = np.zeros(0, dtype=bool)

    def find_messages(self, rows: IntArray, codes: IntArray) -> None:
        """Finds the messages that carry gradients.

        Args:
            rows: Messages, each of which carries some tensors.
            codes: These tensors' codes.
        """
        messages = self._scan.messages
        counts = messages.tensor_count[rows]
        enqueue = np.repeat(messages.enqueue[rows], counts)
        keys = _pairs(np.repeat(place_in(messages.step[rows], self._numbers), counts), codes)
        at = place_in(keys, self._keys)
        trained = distinct(_codes_of(self._keys))
        self.first = (codes != NULL) & ~np.isin(codes, trained)
        self.last = self.first.copy()
        if not len(self._keys):
            return
        has = at != NULL
        after = has & (enqueue >= self._time[at])
        spreads = [number for number, op in enumerate(messages.ops) if op in _SPREADING]
        reduces = np.repeat(~np.isin(messages.op[rows], spreads), counts)
        for among, only_last in ((after & reduces, False), (after, False), (has & reduces, True)):
            some = np.flatnonzero(among & ~self._is_sent[at])
            some = some[np.argsort(enqueue[some], kind="stable")]
            _, newest = np.unique(at[some][::-1], return_index=True)
            _, oldest = np.unique(at[some], return_index=True)
            last = some[::-1][newest]
            self.last[last] = True
            self.first[last if only_last else some[oldest]] = True
            self._is_sent[at[some]] = True

    def take_ready(self) -> tuple[IntArray, IntArray, IntArray]:
        """Returns code and step index of each gradient, and when it was finally ready.

        In steps in which it was sent, if it ever was: those that its messages are of. Can be called
        once: the times of all ranks together would take much memory.
        """
        code = _codes_of(self._keys)
        chosen = self._is_sent | ~np.isin(code, code[self._is_sent])
        found = code[chosen], self._keys[chosen] >> _CODE_BITS, self._time[chosen]
        self._keys = self._time = self._is_sent = np.zeros(0, dtype=np.int64)
        return found


def _pairs(place: IntArray, code: IntArray) -> IntArray:
    """One number for a step's place and a tensor's code; `NULL` where one of them is."""
    pairs = (place.astype(np.int64) << _CODE_BITS) | code
    return np.where((place == NULL) | (code == NULL), NULL, pairs)


def _codes_of(pairs: IntArray) -> IntArray:
    return np.asarray(pairs & ((1 << _CODE_BITS) - 1))


@dataclass(frozen=True)
class _Part:
    """The tensor times of one rank in the steady steps, one block at a time.

    Attributes:
        scan: The rank.
        table: Its tensors.
        numbers: Its steps.
        begins: When each begins, ns.
        rows: Its messages that carry tensors in these steps.
        blocks: Bounds of blocks of `rows`.
        items: Bounds of each message's tensors, in `Messages.tensors`.
        gradients: Which of these messages carry gradients.
    """

    scan: RankScan
    table: _Table
    numbers: IntArray
    begins: IntArray
    rows: IntArray
    blocks: list[tuple[int, int]]
    items: IntArray
    gradients: _Gradients

    @staticmethod
    def of(scan: RankScan, table: _Table, steady: IntArray) -> _Part:
        messages = scan.messages
        counted = in_steps(scan.step, steady)
        numbers = scan.step[counted]
        items = np.append(0, np.cumsum(messages.tensor_count, dtype=np.int64))
        rows = np.flatnonzero(in_steps(messages.step, numbers) & (messages.tensor_count > 0))
        # A block ends with the message that fills it.
        filled = np.cumsum(messages.tensor_count[rows], dtype=np.int64) // _BLOCK
        cuts = np.flatnonzero(np.diff(filled)) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        blocks = [(low, high) for low, high in pairwise(bounds) if high > low]
        gradients = _Gradients(scan, table, numbers)
        part = _Part(scan, table, numbers, scan.step_start[counted], rows, blocks, items, gradients)
        if len(rows):
            gradients.find_messages(rows, table.codes(messages.tensors[part._items(rows)]))
        return part

    def take_ready(self) -> IntArray:
        """Returns keys of the times at which gradients became ready, from the start of the step.

        Can be called once.
        """
        code, place, time = self.gradients.take_ready()
        return _keys(code, time - self.begins[place])

    def times_of(self, name: str) -> Iterator[IntArray]:
        """Returns keys of one time of the messages that carry each tensor's gradient."""
        messages, gradients = self.scan.messages, self.gradients
        wanted = gradients.last if name in _OF_LAST else gradients.first
        seen = 0
        for low, high in self.blocks:
            rows = self.rows[low:high]
            counts = messages.tensor_count[rows]
            tensors = self.table.codes(messages.tensors[self._items(rows)])
            tensors = np.where(wanted[seen : seen + len(tensors)], tensors, NULL)
            seen += len(tensors)
            if name == "bucket":
                yield _keys(tensors, np.repeat(counts, counts))
                continue
            times = self._times(name)
            known = times[rows] != NULL_NS
            begin = self.begins[place_in(messages.step[rows], self.numbers)]
            since = np.where(known, times[rows], begin) - begin
            if not known.all():
                tensors = np.where(np.repeat(known, counts), tensors, NULL)
            yield _keys(tensors, np.repeat(since, counts))

    def _times(self, name: str) -> IntArray:
        """One time of every message, ns; `NULL_NS` where it is not known."""
        if name == "complete":
            return self.scan.messages.end
        if name == "waited":
            return waits_end(self.scan.messages, self.scan.waits)
        if name == "updated":
            return updates_end(self.scan)
        times: IntArray = getattr(self.scan.messages, name)
        return times

    def add_exposed(self, sums: FloatArray, count: IntArray, period: IntArray) -> None:
        """Adds each tensor's part of its messages' exposed time, and counts the messages.

        Args:
            sums: Exposed time by period and code, ns.
            count: Messages by code.
            period: The period of each step.
        """
        messages, activity = self.scan.messages, self.scan.activity
        if activity.compute is None:
            return
        parts = exposed_parts(messages, subtract(activity.comm, activity.compute))
        for low, high in self.blocks:
            rows = self.rows[low:high]
            counts = messages.tensor_count[rows]
            tensor = messages.tensors[self._items(rows)]
            weight = self.table.bytes(tensor)
            totals = np.add.reduceat(weight, np.cumsum(counts) - counts)
            equal = np.repeat(parts[rows] / counts, counts)
            by_size = weight * np.repeat(parts[rows] / np.maximum(totals, 1), counts)
            shares = np.where(np.repeat(totals > 0, counts), by_size, equal)
            codes = self.table.codes(tensor)
            kept = codes != NULL
            count += np.bincount(codes[kept], minlength=len(count))
            of_message = period[place_in(messages.step[rows], self.numbers)]
            of_tensor = np.repeat(of_message, counts)
            for one in distinct(of_message).tolist():
                some = kept & (of_tensor == one)
                sums[one] += np.bincount(codes[some], weights=shares[some], minlength=len(count))

    def _items(self, rows: IntArray) -> IntArray | slice:
        """Places in `Messages.tensors` of the tensors of some messages, in order."""
        low, high = self.items[rows], self.items[rows + 1]
        if int(high[-1] - low[0]) == int((high - low).sum()):
            return slice(int(low[0]), int(high[-1]))
        return ranges(low, high - low)[1]


def _keys(codes: IntArray, values: IntArray) -> IntArray:
    """One number per value that sorts by code, then by value; those of `NULL` are left out.

    Sorting single integers is many times faster than sorting by two keys.
    """
    kept = codes != NULL
    if not kept.all():
        codes, values = codes[kept], values[kept]
    bounded = np.clip(values, -_LIMIT, _LIMIT - 1).astype(np.int64) + _LIMIT
    return np.asarray((codes.astype(np.int64) << _VALUE_BITS) | bounded)


def _medians(blocks: Iterable[IntArray], count: int) -> FloatArray:
    """Median by tensor of the values in some keys; NaN for those without a value."""
    gathered = Gathered(np.int64)
    for block in blocks:
        gathered.add(block)
    return _medians_of(gathered.take_values(), count)


def _medians_of(keys: IntArray, count: int) -> FloatArray:
    """The same of keys in one array, which is sorted."""
    keys.sort()
    first = np.searchsorted(keys, np.arange(count + 1, dtype=np.int64) << _VALUE_BITS)
    counts = np.diff(first)
    some = np.flatnonzero(counts)
    low, high = first[some] + (counts[some] - 1) // 2, first[some] + counts[some] // 2
    found = np.full(count, np.nan)
    found[some] = (_value(keys[low]) + _value(keys[high])) / 2
    return found


def _value(keys: IntArray) -> IntArray:
    return np.asarray((keys & ((1 << _VALUE_BITS) - 1)) - _LIMIT)


def _us(value: float) -> float | None:
    return None if np.isnan(value) else float(value) / 1e3


_TENSOR_TIMES: Final = (
    *("ready_us", "enqueue_us", "start_us", "complete_us", "waited_us", "updated_us", "bucket"),
)


class _TensorMerger:
    """Merges ranges of steps: a median is the median of those of the ranges."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._bytes: list[int] = []
        self._times: list[tuple[FloatArray, FloatArray, float]] = []
        self._sums: KeyedSums[str] = KeyedSums(2)
        self._weight = 0.0
        self._courses: dict[int, TensorTimes] = {}

    def add(self, times: TensorTimes, steps: Steps) -> None:
        """Adds the times in a range."""
        weight = float(times.rank_steps.sum())
        self._weight += weight
        for row in times.rows:
            if row.name not in self._places:
                self._places[row.name] = len(self._bytes)
                self._bytes.append(row.bytes)
        rows = [[getattr(row, name) for name in _TENSOR_TIMES] for row in times.rows]
        if rows:
            places = np.array([self._places[row.name] for row in times.rows])
            self._times.append((places, np.array(rows, dtype=np.float64), weight))
        self._sums.add(
            [row.name for row in times.rows],
            [(row.exposed_us, row.messages) for row in times.rows],
            weight,
        )
        self._courses[int(steps.number[0])] = times._replace(rows=())

    def result(self) -> TensorTimes:
        """The times in all ranges."""
        medians = self._merged_medians()
        weight = max(self._weight, 1.0)
        rows = []
        for name, (exposed, messages) in self._sums.items():
            values = medians[self._places[name]].tolist()
            times = {
                column: None if np.isnan(value) else value
                for column, value in zip(_TENSOR_TIMES, values, strict=True)
            }
            bucket = times.pop("bucket")
            rows.append(
                TensorRow(
                    name=name,
                    bytes=self._bytes[self._places[name]],
                    exposed_us=None if exposed is None else exposed / weight,
                    messages=(messages or 0.0) / weight,
                    bucket=None if bucket is None else round(bucket),
                    **times,
                )
            )
        course, rank_steps = self._course()
        return TensorTimes(sorted_rows(rows), course, rank_steps)

    def _merged_medians(self) -> FloatArray:
        """The medians of the ranges' medians, shape (tensors, times); NaN for unknown ones."""
        found = np.full((len(self._bytes), len(_TENSOR_TIMES)), np.nan)
        # In steps without a gradient, messages carry a parameter for other reasons.
        ready = [
            np.isfinite(times[:, _TENSOR_TIMES.index("ready_us")]) for _, times, _ in self._times
        ]
        trained = np.zeros(len(self._bytes), dtype=bool)
        for (places, _, _), known in zip(self._times, ready, strict=True):
            trained[places[known]] = True
        values = np.full((len(self._times), len(self._bytes)), np.nan)
        weights = np.array([weight for _, _, weight in self._times])
        for column in range(len(_TENSOR_TIMES)):
            values[:] = np.nan
            for part, (places, times, _) in enumerate(self._times):
                counts = ready[part] | ~trained[places]
                values[part, places[counts]] = times[counts, column]
            found[:, column] = weighted_medians(values, weights)
        return found

    def _course(self) -> tuple[dict[str, FloatArray], Any]:
        """The exposed time of each tensor in at most `MAX_PERIODS` periods, and their steps."""
        courses = [self._courses[step] for step in sorted(self._courses)]
        rank_steps = np.concatenate([times.rank_steps for times in courses])
        count = len(rank_steps)
        group = np.arange(count) * min(MAX_PERIODS, count) // max(count, 1)
        first = np.flatnonzero(np.append(True, np.diff(group) > 0))[: max(count, 0)]
        sums = np.add.reduceat(rank_steps, first) if count else rank_steps
        names = {name: None for times in courses for name in times.course}
        course = {}
        for name in names:
            of_period = [
                times.course.get(name, np.zeros(len(times.rank_steps))) for times in courses
            ]
            exposed = np.concatenate(of_period) * rank_steps
            course[name] = np.add.reduceat(exposed, first) / np.maximum(sums, 1)
        return course, sums


def weighted_medians(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The weighted median of each column: half of the weight is on either side of it.

    Args:
        values: Shape (rows, columns); NaN for unknown ones, which do not count.
        weights: Of each row.

    Returns:
        One value for each column; NaN where none is known.
    """
    if not len(values):
        return np.full(values.shape[1], np.nan)
    order = np.argsort(values, axis=0, kind="stable")  # NaN last
    ordered = np.take_along_axis(values, order, axis=0)
    held = np.cumsum(np.where(np.isnan(ordered), 0.0, weights[order]), axis=0)
    columns = np.arange(values.shape[1])
    low = ordered[np.argmax(held >= held[-1] / 2, axis=0), columns]
    high = ordered[np.argmax(held > held[-1] / 2, axis=0), columns]
    return np.asarray((low + high) / 2)


TENSORS: Final[Measure[TensorTimes, tuple[TensorRow, ...]]] = Measure(
    "tensors",
    lambda whole: whole.found.of(TENSORS).rows,
    lambda joined: joined.once(find_tensors),
    _TensorMerger,
    of="steady",
    rows=TensorRow,
)
TENSOR_COURSE: Final = derived("tensor_course", lambda whole: whole.found.of(TENSORS).course)
