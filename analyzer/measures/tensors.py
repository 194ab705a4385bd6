"""The life of every parameter's gradient: ready, enqueued, in flight, complete, exposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.columns import NULL, NULL_NS, IntArray
from ddltrace.analyzer.intervals import Spans, lengths_within, subtract
from ddltrace.analyzer.measures.collectives import in_steps
from ddltrace.analyzer.messages import Messages
from ddltrace.analyzer.model import TensorRow
from ddltrace.analyzer.scan import RankScan

if TYPE_CHECKING:
    from ddltrace.analyzer.trace import Trace

FloatArray = npt.NDArray[np.float64]

_VALUE_BITS: Final = 44
_MAX_PERIODS: Final = 64
_LIMIT: Final = 1 << (_VALUE_BITS - 1)
"""Times from the start of a step are kept within 2.4 hours; there may be 500,000 tensors."""


def exposed_parts(messages: Messages, exposed: Spans) -> FloatArray:
    """Each message's part of its rank's exposed communication, ns.

    Every exposed instant is shared equally by the messages in flight at it, so the parts of
    all messages sum to the whole.
    """
    counted = np.flatnonzero(messages.in_flight & messages.closed)
    parts = np.zeros(len(messages))
    if not len(counted):
        return parts
    start, end = messages.start[counted], messages.end[counted]
    time = np.unique(np.concatenate([start, end]))
    opened = np.searchsorted(np.sort(start), time, side="right")
    ended = np.searchsorted(np.sort(end), time, side="right")
    flying = np.maximum(opened - ended, 1)[:-1]
    per_message = lengths_within(exposed, time[:-1], time[1:]) / flying
    sums = np.append(0.0, np.cumsum(per_message))
    parts[counted] = sums[np.searchsorted(time, end)] - sums[np.searchsorted(time, start)]
    return parts


def tensor_rows(
    trace: Trace, scans: Mapping[int, RankScan], steady: IntArray
) -> tuple[tuple[TensorRow, ...], dict[str, FloatArray]]:
    """One row per parameter, the most exposed first, and its exposed time in the run's course.

    Args:
        trace: Names the tensors.
        scans: Rank -> its scan.
        steady: Numbers of the steps that count.

    Returns:
        The rows, see `TensorRow`; and name -> exposed communication, microseconds per rank and
        step, in each of at most 64 periods of equally many steps, in order.
    """
    codes: dict[str, int] = {}
    sizes: list[int] = []
    ready = _Values()
    lives = {name: _Values() for name in ("enqueue", "start", "complete", "bucket")}
    exposed = _Sums(min(_MAX_PERIODS, max(len(steady), 1)))
    rank_steps = np.zeros(exposed.periods)
    for rank, scan in scans.items():
        infos = trace.tensors(rank)
        if not infos:
            continue
        for info in infos:
            if info.name not in codes:
                codes[info.name] = len(sizes)
                sizes.append(info.bytes)
        table = _Table(
            np.array([info.id for info in infos] + [NULL]),
            np.array([codes[info.name] for info in infos] + [NULL]),
            np.array([max(info.bytes, 0) for info in infos] + [0]),
        )
        counted = in_steps(scan.step, steady)
        numbers, begins = scan.step[counted], scan.step_start[counted]
        period = np.searchsorted(steady, numbers) * exposed.periods // max(len(steady), 1)
        rank_steps += np.bincount(period, minlength=exposed.periods)
        kept = in_steps(scan.gradient_step, numbers)
        begin = begins[np.searchsorted(numbers, scan.gradient_step[kept])]
        ready.add(table.codes(scan.gradient_tensor[kept]), scan.gradient_time[kept] - begin)
        _add_messages(scan, table, numbers, begins, lives)
        exposed.add(*_exposed_shares(scan, table, numbers, period), len(sizes))
    medians = {name: values.medians(len(sizes)) for name, values in lives.items()}
    ready_at = ready.medians(len(sizes))
    sums, count = exposed.of(len(sizes))
    total = max(float(rank_steps.sum()), 1.0)
    rows = [
        TensorRow(
            name=name,
            bytes=sizes[i],
            ready_us=_us(ready_at[i]),
            enqueue_us=_us(medians["enqueue"][i]),
            start_us=_us(medians["start"][i]),
            complete_us=_us(medians["complete"][i]),
            exposed_us=_us(float(sums[i].sum()) / total) if count[i] else None,
            messages=float(count[i]) / total,
            bucket=int(medians["bucket"][i]) if count[i] else None,
        )
        for name, i in codes.items()
    ]
    seen = rank_steps > 0
    course = sums[:, seen] / rank_steps[seen] / 1e3
    return (
        tuple(sorted(rows, key=lambda row: (-(row.exposed_us or 0.0), -row.bytes))),
        {name: course[i] for name, i in codes.items() if count[i]},
    )


class _Table:
    """A rank's tensors: the last entry stands for ids that it does not name."""

    def __init__(self, ids: IntArray, codes: IntArray, sizes: IntArray) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._ids, self._codes, self._sizes = ids, codes, sizes

    def codes(self, tensor: IntArray) -> IntArray:
        return np.asarray(self._codes[self._find(tensor)])

    def bytes(self, tensor: IntArray) -> FloatArray:
        return np.asarray(self._sizes[self._find(tensor)], dtype=np.float64)

    def _find(self, tensor: IntArray) -> IntArray:
        ids = self._ids[self._order]
        if len(ids) > 1 and ids[-1] == len(ids) - 2:  # NULL, then 0, 1, 2, ...: the usual case
            inside = (tensor >= 0) & (tensor < len(ids) - 1)
            return np.where(inside, self._order[np.where(inside, tensor + 1, 0)], len(ids) - 1)
        place = np.minimum(np.searchsorted(ids, tensor), len(ids) - 1)
        return np.where(ids[place] == tensor, self._order[place], len(ids) - 1)


class _Values:
    """Whole numbers by tensor, collected rank after rank and reduced at the end."""

    def __init__(self) -> None:
        self._keys: list[IntArray] = []

    def add(self, codes: IntArray, values: IntArray) -> None:
        """Adds one value per code; those of `NULL` are left out."""
        kept = codes != NULL
        if not kept.all():
            codes, values = codes[kept], values[kept]
        # One number per value that sorts by code, then by value: sorting single integers is
        # many times faster than sorting by two keys.
        bounded = np.clip(values, -_LIMIT, _LIMIT - 1).astype(np.int64) + _LIMIT
        self._keys.append((codes.astype(np.int64) << _VALUE_BITS) | bounded)

    def medians(self, count: int) -> FloatArray:
        """Median by tensor; NaN for those without a value."""
        keys = np.concatenate([*self._keys, np.empty(0, np.int64)])
        self._keys = []
        keys.sort()
        first = np.searchsorted(keys, np.arange(count + 1, dtype=np.int64) << _VALUE_BITS)
        counts = np.diff(first)
        some = np.flatnonzero(counts)
        low, high = first[some] + (counts[some] - 1) // 2, first[some] + counts[some] // 2
        values = (keys & ((1 << _VALUE_BITS) - 1)) - _LIMIT
        found = np.full(count, np.nan)
        found[some] = (values[low] + values[high]) / 2
        return found


class _Sums:
    """Sums by tensor and period, and counts by tensor."""

    def __init__(self, periods: int) -> None:
        self.periods = periods
        self._sums = np.empty((0, periods))
        self._counts = np.empty(0, dtype=np.int64)

    def add(self, codes: IntArray, values: FloatArray, period: IntArray, count: int) -> None:
        """Adds one value per code and period; there are `count` codes so far."""
        kept = codes != NULL
        self._grow(count)
        place = codes[kept] * self.periods + period[kept]
        sums = np.bincount(place, weights=values[kept], minlength=count * self.periods)
        self._sums += sums.reshape(count, self.periods)
        self._counts += np.bincount(codes[kept], minlength=count)

    def of(self, count: int) -> tuple[FloatArray, IntArray]:
        """Sums and count of each of `count` tensors."""
        self._grow(count)
        return self._sums, self._counts

    def _grow(self, count: int) -> None:
        more = count - len(self._sums)
        self._sums = np.pad(self._sums, ((0, more), (0, 0)))
        self._counts = np.pad(self._counts, (0, more))


def _add_messages(
    scan: RankScan,
    table: _Table,
    numbers: IntArray,
    begins: IntArray,
    lives: Mapping[str, _Values],
) -> None:
    messages = scan.messages
    rows = np.flatnonzero(in_steps(messages.step, numbers) & (messages.tensor_count > 0))
    begin = begins[np.searchsorted(numbers, messages.step[rows])]
    counts = messages.tensor_count[rows]
    codes = table.codes(messages.tensors[_items(messages, rows)])
    lives["enqueue"].add(codes, np.repeat(messages.enqueue[rows] - begin, counts))
    lives["start"].add(codes, np.repeat(messages.start[rows] - begin, counts))
    lives["bucket"].add(codes, np.repeat(counts, counts))
    done = np.repeat(messages.end[rows] != NULL_NS, counts)
    complete = np.where(messages.end[rows] == NULL_NS, 0, messages.end[rows] - begin)
    lives["complete"].add(np.where(done, codes, NULL), np.repeat(complete, counts))


def _exposed_shares(
    scan: RankScan, table: _Table, numbers: IntArray, period: IntArray
) -> tuple[IntArray, FloatArray, IntArray]:
    """Codes of the tensors of each message, their parts of its exposed time, and its period."""
    messages, activity = scan.messages, scan.activity
    if activity.compute is None:
        return np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
    rows = np.flatnonzero(in_steps(messages.step, numbers) & (messages.tensor_count > 0))
    parts = exposed_parts(messages, subtract(activity.comm, activity.compute))[rows]
    counts = messages.tensor_count[rows]
    tensor = messages.tensors[_items(messages, rows)]
    weight = table.bytes(tensor)
    begins = np.cumsum(counts) - counts
    totals = np.add.reduceat(weight, begins) if len(begins) else weight
    equal = np.repeat(parts / np.maximum(counts, 1), counts)
    by_size = weight * np.repeat(parts / np.maximum(totals, 1), counts)
    shares = np.where(np.repeat(totals > 0, counts), by_size, equal)
    of_message = period[np.searchsorted(numbers, messages.step[rows])]
    return table.codes(tensor), shares, np.repeat(of_message, counts)


def _items(messages: Messages, rows: IntArray) -> IntArray:
    """Places in `Messages.tensors` of the tensors of some messages, in order."""
    counts = messages.tensor_count[rows]
    begins = (np.cumsum(messages.tensor_count) - messages.tensor_count)[rows]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(begins, counts) + within)


def _us(value: float) -> float | None:
    return None if np.isnan(value) else float(value) / 1e3
