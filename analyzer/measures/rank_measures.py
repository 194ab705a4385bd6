"""Measures each rank in its steps and over its window.

These are not tasks of the engine: for simulated ranks of 360 events, sending the scans to workers
took more of the client's processor time than measuring them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import BoolArray, FloatArray, IntArray
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Spans,
    clip,
    intersect,
    length,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_messages import Messages
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Releases
from ddltrace.analyzer.measures.breakdown import (
    FIELDS,
    measure_windows,
    rank_sets,
    ratio,
)
from ddltrace.analyzer.measures.idle import IdleRow, WaitedFor, find_waited_for, idle_row
from ddltrace.analyzer.measures.keyed_sums import RowSums
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, derived
from ddltrace.analyzer.measures.path_parts import CopyTimes
from ddltrace.analyzer.measures.steps import Steps, in_steps
from ddltrace.analyzer.measures.throughput import rates_of_ranks, sums_of_ranks
from ddltrace.tracer.trace.schema import CLOCKS

AMOUNTS: Final = {"samples": 0.0, "tokens": 0.0, "flops": np.nan}
"""What a rank loads and computes in a step, as in `RankScan` -> its value in all other steps."""

_GC: Final = "gc_ns"

_COLUMNS = ("rank", "step", "start_ns", "launches", *AMOUNTS, _GC, *FIELDS)


@dataclass(frozen=True)
class MessageClocks:
    """How many messages of a rank have times from which clock; imported messages have none.

    Attributes:
        device: Events of the device around the message.
        gloo: Gloo's threads, when they begin and end it.
        wait: The job's own wait or question, when it found the message complete.
        thread: A thread of the tracer that waited for it.
        polling: A thread of the tracer that asked for its end every 0.5 to 5 ms.
        host: The host, around a call that returned when the message was complete.
        kernel: The profiler, from the message's kernel.
        graph: None: they ran in replays of CUDA graphs.
    """

    device: int
    gloo: int
    wait: int
    thread: int
    polling: int
    host: int
    kernel: int
    graph: int


@dataclass(frozen=True)
class RankRow:
    """One rank over the analyzed window: the whole trace, or the requested steps.

    Attributes:
        rank: Global rank.
        step_us_p50: Median of the durations of its own steady steps.
        step_us_p95: Their 95th percentile.
        span_us: From the first start to the last end of its device work, without unrecorded steps
            in between.
        compute_us: Compute.
        comm_us: Communication: ``wait_us + transfer_us`` where every message could be joined; None
            if its messages ended at unknown times.
        overlap_us: Overlap.
        overlap_ratio: Overlap over communication.
        exposed_comm_us: Exposed communication.
        copy_us: Copies, within `span_us`.
        copies: The same by direction, each the union of its copies; concurrent copies in several
            directions count in each.
        idle_us: `span_us` without device work.
        wait_us: Waiting: messages are in flight, and all of them wait for another rank.
        transfer_us: Transfer: a message is in flight whose ranks have all arrived.
        host_wait_us: Time in which a host thread is blocked on a message.
        data_us: Data loading.
        update_us: The optimizer's update.
        bytes_sent: Input bytes of its messages (on the wire where known); zero for receives and for
            ranks that receive from a root.
        messages: Number of messages, completed or not.
        open_messages: Number of messages that had not completed when last observed.
        clocks: How many messages have times from which clock.
        samples_per_s: Samples in the batches that it loads in its steady steps, per second: the
            first dimension of the first tensor of each batch. Null unless that is known of every
            batch.
        tokens_per_s: Tokens likewise, with padding: the elements of the two-dimensional tensor of
            32-bit or 64-bit integers that is called ``input_ids`` or ``tokens``, or else of the
            first one.
        gc_us: Python's garbage collections of at least 1 ms in its steady steps; null if they were
            not recorded.
    """

    rank: int
    step_us_p50: float | None
    step_us_p95: float | None
    span_us: float | None
    compute_us: float | None
    comm_us: float | None
    overlap_us: float | None
    overlap_ratio: float | None
    exposed_comm_us: float | None
    copy_us: float
    copies: CopyTimes
    idle_us: float | None
    wait_us: float | None
    transfer_us: float | None
    host_wait_us: float
    data_us: float
    update_us: float
    bytes_sent: int
    messages: int
    open_messages: int
    clocks: MessageClocks
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    gc_us: float | None = None


@dataclass(frozen=True)
class RankMeasures:
    """The measures of all ranks.

    Attributes:
        steps: Measures of every rank in each of its steps, in its whole window if there are none:
            ``rank``, ``step``, ``start_ns``, ``launches``, ``samples``, ``tokens``, ``flops``,
            ``gc_ns`` and `FIELDS`, sorted by rank.
        ranks: A row for each rank.
        idle: Idle time of each rank by cause.
        waited_for: Rank -> the ranks for which it waits.
    """

    steps: dict[str, FloatArray]
    ranks: tuple[RankRow, ...]
    idle: tuple[IdleRow, ...]
    waited_for: dict[int, WaitedFor]


class _Rank(NamedTuple):
    """What the measures of a rank depend on.

    Attributes:
        scan: The rank.
        releases: When its messages were released, and by whom.
        joined: The steps.
        has_gaps: Whether the rank left steps unrecorded, to measure the overhead.
        collections: Whether garbage collections were recorded.
    """

    scan: RankScan
    releases: Releases
    joined: JoinedSteps
    has_gaps: bool
    collections: bool


class _Measured(NamedTuple):
    columns: dict[str, FloatArray]
    row: RankRow
    idle: IdleRow
    waited_for: WaitedFor


def measure_ranks(joined: JoinedSteps) -> RankMeasures:
    """Measures every rank."""
    trace, scans = joined.trace, joined.scans
    ranks = [
        _Rank(
            scan,
            joined.joined.releases(rank),
            joined,
            any(info.cost for info in trace.infos(rank)),
            all(info.collections for info in trace.infos(rank)),
        )
        for rank, scan in scans.items()
    ]
    found = list(map(_measure, ranks))
    return RankMeasures(
        steps={
            name: np.concatenate([one.columns[name] for one in found]) if found else np.empty(0)
            for name in _COLUMNS
        },
        ranks=tuple(one.row for one in found),
        idle=tuple(one.idle for one in found),
        waited_for={rank: one.waited_for for rank, one in zip(scans, found, strict=True)},
    )


def _measure(rank: _Rank) -> _Measured:
    scan = rank.scan
    sets = rank_sets(scan, rank.releases)
    number, start, end = _steps_of(rank)
    window = _window(rank, start, end)
    whole = Spans(np.array([scan.first]), np.array([scan.last]))
    # Together, because most of the time goes into calls for few windows each.
    parts = [Spans(start, end), _with_empty(whole), _with_empty(window)]
    measured = measure_windows(
        sets,
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.end for part in parts]),
    )
    ends = np.cumsum([len(part.start) for part in parts]).tolist()
    by_step = {name: values[: ends[0]] for name, values in measured.items()}
    in_trace, in_window = (
        {name: float(values[begin:end].sum()) for name, values in measured.items()}
        for begin, end in pairwise(ends)
    )
    columns = {
        "rank": np.full(len(number), scan.rank),
        "step": number,
        "start_ns": start,
        "launches": np.array([scan.launches.get(step, 0) for step in number.tolist()], dtype=float),
        **{
            name: np.array([scan.amounts[name].get(step, other) for step in number.tolist()], float)
            for name, other in (AMOUNTS | {_GC: 0.0 if rank.collections else np.nan}).items()
        },
        **by_step,
    }
    if rank.joined.selected:
        in_trace = {name: float(by_step[name].sum()) for name in FIELDS}
    waited_for = find_waited_for(scan, rank.releases, intersect(sets.exposed_waiting, window))
    return _Measured(
        columns,
        _rank_row(rank, columns, window, in_trace),
        idle_row(scan.rank, in_window, waited_for),
        waited_for,
    )


def _with_empty(windows: Spans) -> Spans:
    """The windows and an empty one, which shows the measures that the trace does not contain."""
    return Spans(np.append(windows.start, 0), np.append(windows.end, 0))


def _steps_of(rank: _Rank) -> tuple[IntArray, IntArray, IntArray]:
    """Number, start and end of a rank's steps; its whole window as step -1 if there are none."""
    scan = rank.scan
    if len(rank.joined.steps.number):
        mine = in_steps(scan.step, rank.joined.steps.number)
        return scan.step[mine], scan.step_start[mine], scan.step_end[mine]
    some = slice(0, 1 if scan.events else 0)
    return np.array([-1])[some], np.array([scan.first])[some], np.array([scan.last])[some]


def _rank_row(
    rank: _Rank, columns: Mapping[str, FloatArray], window: Spans, total: Mapping[str, float]
) -> RankRow:
    """A rank's row.

    Args:
        columns: Its measures in each step.
        window: From the first start to the last end of its device work.
        total: Its measures over the whole trace, or over the selected steps.
    """
    scan, activity = rank.scan, rank.scan.activity
    counted = in_steps(columns["step"].astype(np.int64), rank.joined.steady)
    walls = columns["wall_ns"][counted] / 1e3
    chosen = np.ones(len(scan.messages), dtype=bool)
    if rank.joined.selected:
        chosen = in_steps(scan.messages.step, rank.joined.steps.number)
    span = length(window)
    known = activity.compute is not None
    return RankRow(
        rank=scan.rank,
        step_us_p50=float(np.median(walls)) if len(walls) else None,
        step_us_p95=float(np.percentile(walls, 95)) if len(walls) else None,
        span_us=span / 1e3 if known or activity.device else None,
        compute_us=_us(total["compute_ns"]),
        comm_us=_us(total["comm_ns"]),
        overlap_us=_us(total["overlap_ns"]),
        overlap_ratio=ratio(total["overlap_ns"], total["comm_ns"]),
        exposed_comm_us=_us(total["exposed_ns"]),
        copy_us=length(intersect(activity.copies, window)) / 1e3,
        copies=CopyTimes(
            *(length(intersect(spans, window)) / 1e3 for spans in activity.copies_by_direction)
        ),
        idle_us=(span - length(intersect(activity.work, window))) / 1e3
        if known and activity.comm_known
        else None,
        wait_us=_us(total["waiting_ns"]),
        transfer_us=_us(total["transfer_ns"]),
        host_wait_us=total["blocked_ns"] / 1e3,
        data_us=total["data_ns"] / 1e3,
        update_us=total["update_ns"] / 1e3,
        bytes_sent=bytes_sent(scan, chosen),
        messages=int(chosen.sum()),
        open_messages=int((chosen & scan.messages.unfinished).sum()),
        clocks=_clocks(scan.messages, chosen),
    )


def _clocks(messages: Messages, chosen: BoolArray) -> MessageClocks:
    """How many of a rank's messages have times from which clock."""
    counts = np.bincount(messages.clock[chosen & (messages.clock >= 0)], minlength=1)
    by_name = dict(zip(messages.clocks, counts.tolist(), strict=False))
    return MessageClocks(*(by_name.get(name, 0) for name in CLOCKS))


def _window(rank: _Rank, start: IntArray, end: IntArray) -> Spans:
    """From the first start to the last end of a rank's device work.

    Steps that were left unrecorded to measure the overhead do not count.

    Args:
        start: Starts of its steps.
    """
    work = rank.scan.activity.work
    if rank.joined.selected:
        work = clip(work, int(start.min()), int(end.max())) if len(start) else EMPTY
    if not len(work.start):
        return EMPTY
    whole = union(_begin(rank, work), work.end[-1:])
    return subtract(whole, subtract(_left_out(rank), work))


def _begin(rank: _Rank, work: Spans) -> IntArray:
    """Where the window of a rank begins: in a range, where that of the range before ends."""
    scan = rank.scan
    if rank.joined.continues and len(rank.joined.steps.number):
        former = np.flatnonzero(scan.step < rank.joined.steps.number[0])
        if len(former):
            until = int(scan.step_end[former[-1]])
            before = clip(scan.activity.work, scan.first, until).end[-1:]
            if len(before):
                return np.minimum(before, work.start[:1])
    return work.start[:1]


def _left_out(rank: _Rank) -> Spans:
    """The steps that a rank left unrecorded between others, to measure the overhead."""
    if not rank.has_gaps:
        return EMPTY
    scan = rank.scan
    jumps = np.flatnonzero(np.diff(scan.step) > 1)
    return union(scan.step_end[jumps], scan.step_start[jumps + 1])


def bytes_sent(scan: RankScan, chosen: BoolArray) -> int:
    """Input bytes of a rank's messages; received bytes do not count."""
    messages = scan.messages
    size = np.where(messages.wire_bytes >= 0, messages.wire_bytes, messages.bytes)
    names = np.array([*messages.ops, ""])[messages.op]
    given = (names == "recv") | (
        np.isin(names, ("broadcast", "scatter"))
        & (messages.peer >= 0)
        & (messages.peer != scan.rank)
    )
    return int(np.maximum(size[chosen & ~given], 0).sum())


def _us(ns: float) -> float | None:
    """A time in microseconds; None if it is unknown."""
    return None if np.isnan(ns) else ns / 1e3


_NS: Final = 3
"""Decimals of microseconds: all times are whole nanoseconds."""


class _RankMerger:
    """Merges the measures of ranks in ranges of steps."""

    def __init__(self) -> None:
        self._columns: dict[str, list[FloatArray]] = defaultdict(list)
        self._steady: list[IntArray] = []
        self._ranks: RowSums[RankRow] = RowSums("rank")
        self._idle: RowSums[IdleRow] = RowSums("rank")
        self._waited_for: Counter[tuple[int, int]] = Counter()

    def add(self, found: RankMeasures, steps: Steps) -> None:
        """Adds a range."""
        self._steady.append(steps.number[steps.steady])
        for name, values in found.steps.items():
            self._columns[name].append(values)
        self._ranks.add(found.ranks)
        self._idle.add(found.idle)
        for rank, others in found.waited_for.items():
            self._waited_for.update({(rank, other): ns for other, ns in others})

    def result(self) -> RankMeasures:
        """The measures of all ranges."""
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        order = np.lexsort((columns["step"], columns["rank"]))
        columns = _without_gaps({name: values[order] for name, values in columns.items()})
        waited_for = self._all_waited_for()
        return RankMeasures(columns, self._rows(columns), self._idle_rows(waited_for), waited_for)

    def _rows(self, columns: Mapping[str, FloatArray]) -> tuple[RankRow, ...]:
        steady = np.isin(columns["step"], np.concatenate(self._steady))
        rank, wall = columns["rank"][steady], columns["wall_ns"][steady] / 1e3
        rows = []
        for row in sorted(self._ranks.rows(digits=_NS), key=lambda row: row.rank):
            mine = wall[slice(*np.searchsorted(rank, [row.rank, row.rank + 1]).tolist())]
            p50, p95 = np.percentile(mine, [50, 95]).tolist() if len(mine) else (None, None)
            overlap, comm = row.overlap_us, row.comm_us or 0.0
            hidden = None if overlap is None else ratio(overlap, comm)
            rows.append(replace(row, step_us_p50=p50, step_us_p95=p95, overlap_ratio=hidden))
        return tuple(rows)

    def _all_waited_for(self) -> dict[int, WaitedFor]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (rank, other), ns in self._waited_for.items():
            found[rank].append((other, ns))
        return {
            rank: tuple(sorted(others, key=lambda each: (-each[1], each[0])))
            for rank, others in found.items()
        }

    def _idle_rows(self, waited_for: Mapping[int, WaitedFor]) -> tuple[IdleRow, ...]:
        rows = sorted(self._idle.rows(digits=_NS), key=lambda row: row.rank)
        first = {rank: others[0][0] for rank, others in waited_for.items() if others}
        return tuple(replace(row, waits_for=first.get(row.rank)) for row in rows)


def _without_gaps(columns: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """Measures of ranks in steps, with those that are unknown in some ranges only.

    A rank whose compute is known in some range did not compute in a range that has none, and one
    whose messages were joined in some range waited for nobody that is known in the others.
    """
    wall, copies = columns["wall_ns"], columns["copy_ns"]
    comm = np.nan_to_num(columns["comm_ns"])
    idle = wall - comm - copies
    instead = {"exposed_ns": comm, "idle_ns": idle, "idle_unknown_ns": idle}
    ranks, which = np.unique(columns["rank"], return_inverse=True)
    found = dict(columns)
    for name in FIELDS:
        unknown = np.isnan(columns[name])
        if unknown.any():
            is_known = np.bincount(which, weights=~unknown, minlength=len(ranks)) > 0
            values = np.where(unknown & is_known[which], instead.get(name, 0.0), columns[name])
            found[name] = values
    return found


def _with_rates(whole: Whole) -> tuple[RankRow, ...]:
    samples, tokens = rates_of_ranks(whole, "samples"), rates_of_ranks(whole, "tokens")
    collecting = {
        rank: ns / 1e3 for rank, ns in sums_of_ranks(whole, _GC).items() if not np.isnan(ns)
    }
    return tuple(
        replace(
            row,
            samples_per_s=samples.get(row.rank),
            tokens_per_s=tokens.get(row.rank),
            gc_us=collecting.get(row.rank),
        )
        for row in whole.found.of(RANKS).ranks
    )


RANKS: Final[Measure[RankMeasures, tuple[RankRow, ...]]] = Measure(
    "ranks",
    _with_rates,
    lambda joined: joined.once(measure_ranks),
    _RankMerger,
    rows=RankRow,
)
IDLE: Final = derived("idle", lambda whole: whole.found.of(RANKS).idle)
RANK_STEPS: Final = derived("rank_steps", lambda whole: whole.rank_steps)
