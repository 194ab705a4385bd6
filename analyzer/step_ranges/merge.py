"""Merges the measures of ranges of steps into those of all their steps.

Counts, bytes, times and the values of single steps are sums and lists, and as exact as if all steps
had been measured at once. Medians and percentiles over messages are those of `Distribution`, within
0.5 %. For a parameter, a median is the median of those of the ranges; a 95th percentile of a kernel
or operator is their mean. Means per step are means over the ranges, weighted by their steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray, IntArray
from ddltrace.analyzer.measures.bandwidth import FitKind, FitSamples, SizeBin
from ddltrace.analyzer.measures.breakdown import FIELDS, ratio
from ddltrace.analyzer.measures.collectives import (
    CollectiveKind,
    CollectiveTimes,
    Joining,
    LinkTimes,
)
from ddltrace.analyzer.measures.device_queues import DeviceQueues
from ddltrace.analyzer.measures.distribution import merged_sums
from ddltrace.analyzer.measures.hangs import Hang, has_lasted
from ddltrace.analyzer.measures.idle import IdleRow, WaitedFor
from ddltrace.analyzer.measures.measured import Measured
from ddltrace.analyzer.measures.mismatches import Mismatch
from ddltrace.analyzer.measures.path_parts import CopyTimes
from ddltrace.analyzer.measures.rank_measures import MessageClocks, RankRow
from ddltrace.analyzer.measures.slow_steps import PathSums
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.measures.steps import RULE, RULE_ONE, Steps, count_warmup
from ddltrace.analyzer.measures.trace_facts import RankFacts
from ddltrace.analyzer.measures.traffic import TrafficRow, largest_rows
from ddltrace.analyzer.step_ranges.keyed_sums import KeyedSums
from ddltrace.analyzer.step_ranges.merge_operations import OperationSums
from ddltrace.analyzer.step_ranges.merge_steady import SteadyMerger
from ddltrace.tracer.trace.schema import OPS

_RANK_TIMES: Final = (
    *("span_us", "compute_us", "comm_us", "overlap_us", "exposed_comm_us", "copy_us", "idle_us"),
    *("wait_us", "transfer_us", "host_wait_us", "data_us", "update_us"),
)
_RANK_COUNTS: Final = ("bytes_sent", "messages", "open_messages")
_CLOCKS: Final = tuple(field.name for field in fields(MessageClocks))
_COPIES: Final = tuple(field.name for field in fields(CopyTimes))
_IDLE: Final = (
    *("idle_us", "data_us", "other_rank_us", "message_us", "host_us", "stopped_us"),
    *("unknown_us", "in_message_us"),
)


class Merger:
    """Merges the measures of ranges, which are added in any order."""

    def __init__(self) -> None:
        self._steps: list[Steps] = []
        self._rows: list[StepRow] = []
        self._sums: dict[int, PathSums] = {}
        self._messages: list[IntArray] = []
        self._bytes: list[IntArray] = []
        self._rank_steps: dict[str, list[FloatArray]] = defaultdict(list)
        self._ranks: KeyedSums[int] = KeyedSums(
            len(_RANK_TIMES) + len(_RANK_COUNTS) + len(_CLOCKS) + len(_COPIES)
        )
        self._idle: KeyedSums[int] = KeyedSums(len(_IDLE))
        self._waited_for: KeyedSums[tuple[int, int]] = KeyedSums(1)
        self._collectives: dict[CollectiveKind, CollectiveTimes] = {}
        self._links: dict[tuple[int, int], LinkTimes] = {}
        self._fit_samples: dict[FitKind, FitSamples] = {}
        self._sizes: KeyedSums[tuple[str, int, int]] = KeyedSums(2)
        self._traffic: KeyedSums[tuple[int, int, str | None]] = KeyedSums(1)
        self._joining: list[Joining] = []
        self._hangs: dict[Any, Hang] = {}
        self._mismatches: dict[Any, Mismatch] = {}
        self._facts: dict[int, RankFacts] = {}
        self._operations = OperationSums()
        self._steady = SteadyMerger()
        self._end: Measured | None = None

    def first_steady_step(self, others: Sequence[Measured]) -> int | None:
        """Number of the first step that is not warm-up.

        Args:
            others: The measures of ranges that have not been added yet.

        Returns:
            The number; None if no step was completed.
        """
        steps = [*self._steps, *(part.steps for part in others)]
        number = np.concatenate([each.number for each in steps])
        if len(number) < 2:
            return int(number[0]) if len(number) else None
        walls = np.concatenate([each.end - each.start for each in steps])
        messages = [*self._messages, *(part.messages_in_steps for part in others)]
        size = [*self._bytes, *(part.bytes_in_steps for part in others)]
        order = np.argsort(number)
        columns = (walls, np.concatenate(messages), np.concatenate(size))
        return int(number[order][count_warmup(*(column[order] for column in columns))])

    def add(self, part: Measured) -> None:
        """Adds the measures of a range."""
        if part.at_end:
            self._end = part
        for each in part.mismatches:
            self._mismatches.setdefault((each.group, each.seq, *each.passed), each)
        for hang in part.hangs:
            self._hangs.setdefault((hang.op, hang.group, hang.seq, hang.entered), hang)
        for rank, facts in part.facts.items():
            former = self._facts.get(rank)
            self._facts[rank] = facts if former is None else _both(former, facts)
        if not len(part.steps):
            return
        self._steps.append(part.steps)
        self._rows += part.rows
        self._sums |= {number: part.path_sums(number) for number in part.steps.number.tolist()}
        self._messages.append(part.messages_in_steps)
        self._bytes.append(part.bytes_in_steps)
        for name, values in part.rank_steps.items():
            self._rank_steps[name].append(values)
        self._add_ranks(part)
        _merge_into(self._collectives, part.collectives, merged_sums)
        _merge_into(self._links, part.links, merged_sums)
        _merge_into(self._fit_samples, part.fit_samples, FitSamples.merged)
        self._sizes.add(
            [(row.op, row.bytes_from, row.bytes_below) for row in part.sizes],
            [(row.count, row.bytes) for row in part.sizes],
        )
        self._traffic.add(
            [(row.src, row.dst, row.assumed) for row in part.traffic],
            [(row.bytes,) for row in part.traffic],
        )
        self._joining.append(part.joining)
        self._operations.add(part)
        if part.steps.steady.all():
            self._steady.add(part)

    def _add_ranks(self, part: Measured) -> None:
        self._ranks.add(
            [row.rank for row in part.ranks],
            [
                (
                    *(getattr(row, name) for name in (*_RANK_TIMES, *_RANK_COUNTS)),
                    *(getattr(row.clocks, name) for name in _CLOCKS),
                    *(getattr(row.copies, name) for name in _COPIES),
                )
                for row in part.ranks
            ],
        )
        self._idle.add(
            [row.rank for row in part.idle],
            [[getattr(row, name) for name in _IDLE] for row in part.idle],
        )
        waited = [
            ((rank, other), ns) for rank, each in part.waited_for.items() for other, ns in each
        ]
        self._waited_for.add([pair for pair, _ in waited], [(ns,) for _, ns in waited])

    def result(self) -> Measured:
        """The measures of all ranges; there is a completed step."""
        steps = _all_steps(self._steps)
        columns, waited_for = self._all_rank_steps(), self._all_waited_for()
        hangs, end = tuple(self._hangs.values()), self._end
        failure = None if end is None else end.failure
        if failure is not None:
            hangs = tuple(hang for hang in hangs if has_lasted(hang))
        return Measured(
            steps=steps,
            messages_in_steps=self._in_order(self._messages),
            bytes_in_steps=self._in_order(self._bytes),
            rank_steps=columns,
            ranks=self._rank_rows(columns, steps),
            idle=self._idle_rows(waited_for),
            waited_for=waited_for,
            rows=tuple(sorted(self._rows, key=lambda row: row.step)),
            path_sums=self._sums.__getitem__,
            collectives=self._collectives,
            links=self._links,
            fit_samples=self._fit_samples,
            sizes=tuple(
                SizeBin(op, low, below, _count(count), _count(size))
                for (op, low, below), (count, size) in sorted(self._sizes.items(), key=_by_op)
            ),
            traffic=largest_rows(
                TrafficRow(src, dst, _count(size), assumed)
                for (src, dst, assumed), (size,) in self._traffic.items()
            ),
            joining=_all_joining(self._joining),
            hangs=hangs,
            mismatches=tuple(self._mismatches.values()),
            failure=failure,
            standstill=None if hangs or end is None else end.standstill,
            kernels=self._operations.kernels(len(columns["step"])),
            operators=self._operations.operators(len(columns["step"])),
            queues=DeviceQueues(),
            facts=self._facts,
            at_end=end is not None,
            steady=self._steady.result(),
        )

    def _in_order(self, columns: Sequence[IntArray]) -> IntArray:
        """One number of each step, in the order of the steps."""
        number = np.concatenate([each.number for each in self._steps])
        return np.asarray(np.concatenate(columns)[np.argsort(number)])

    def _all_rank_steps(self) -> dict[str, FloatArray]:
        columns = {name: np.concatenate(parts) for name, parts in self._rank_steps.items()}
        order = np.lexsort((columns["step"], columns["rank"]))
        return _without_gaps({name: values[order] for name, values in columns.items()})

    def _rank_rows(self, columns: Mapping[str, FloatArray], steps: Steps) -> tuple[RankRow, ...]:
        steady = np.isin(columns["step"], steps.number[steps.steady])
        rank, wall = columns["rank"][steady], columns["wall_ns"][steady] / 1e3
        rows = []
        for number, values in sorted(self._ranks.items()):
            mine = wall[slice(*np.searchsorted(rank, [number, number + 1]).tolist())]
            p50, p95 = np.percentile(mine, [50, 95]).tolist() if len(mine) else (None, None)
            rows.append(_rank_row(number, (p50, p95), values))
        return tuple(rows)

    def _all_waited_for(self) -> dict[int, WaitedFor]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (rank, other), (ns,) in self._waited_for.items():
            found[rank].append((other, _count(ns)))
        return {
            rank: tuple(sorted(others, key=lambda each: (-each[1], each[0])))
            for rank, others in found.items()
        }

    def _idle_rows(self, waited_for: Mapping[int, WaitedFor]) -> tuple[IdleRow, ...]:
        return tuple(
            IdleRow(
                rank=rank,
                waits_for=waited_for[rank][0][0] if rank in waited_for else None,
                **dict(zip(_IDLE, _times(values), strict=True)),
            )
            for rank, values in sorted(self._idle.items())
        )


def as_warmup(part: Measured) -> Measured:
    """The measures of a range whose steps are warm-up."""
    steps = replace(part.steps, steady=np.zeros(len(part.steps), dtype=bool))
    return replace(part, steps=steps, rows=tuple(replace(row, steady=False) for row in part.rows))


def _all_steps(parts: Sequence[Steps]) -> Steps:
    columns = ("number", "start", "end", "last_rank", "lead", "ranks", "steady")
    values = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    order = np.argsort(values["number"])
    rule = RULE if len(order) > 1 else RULE_ONE
    return Steps(**{name: column[order] for name, column in values.items()}, rule=rule)


def _all_joining(parts: Sequence[Joining]) -> Joining:
    names = ("collectives", "complete", "partial", "open", "mismatched", "p2p", "p2p_unmatched")
    return Joining(
        by_order=any(part.by_order for part in parts),
        **{name: sum(getattr(part, name) for part in parts) for name in names},
    )


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


def _rank_row(
    rank: int, step_us: tuple[float | None, float | None], sums: Sequence[float | None]
) -> RankRow:
    """One rank's row.

    Args:
        rank: The rank.
        step_us: Median and 95th percentile of its steady steps.
        sums: Its times, counts and times of copies, in the order of `Merger`.
    """
    values: dict[str, Any] = dict(zip(_RANK_TIMES, _times(sums), strict=False))
    counts = sums[len(_RANK_TIMES) :]
    values |= dict(zip(_RANK_COUNTS, map(_count, counts), strict=False))
    clocks, copied = np.split(counts[len(_RANK_COUNTS) :], [len(_CLOCKS)])
    copies = CopyTimes(*(us or 0.0 for us in _times(copied)))
    overlap = values["overlap_us"]
    return RankRow(
        rank=rank,
        step_us_p50=step_us[0],
        step_us_p95=step_us[1],
        overlap_ratio=None if overlap is None else ratio(overlap, values["comm_us"] or 0.0),
        copies=copies,
        clocks=MessageClocks(*map(_count, clocks)),
        **values,
    )


def _both(former: RankFacts, later: RankFacts) -> RankFacts:
    """Facts about a rank's record over two ranges, which have neighbouring steps in common."""
    return RankFacts(
        events=former.events + later.events,
        damaged=max(former.damaged, later.damaged),
        backwards=max(former.backwards, later.backwards),
        unrecorded_ns=former.unrecorded_ns + later.unrecorded_ns,
        span_ns=former.span_ns + later.span_ns,
        is_partial=True,
    )


def _merge_into(whole: dict[Any, Any], part: Mapping[Any, Any], merge: Any) -> None:
    for key, value in part.items():
        whole[key] = merge([whole[key], value]) if key in whole else value


def _by_op(item: tuple[tuple[str, int, int], Any]) -> tuple[int, str, int]:
    """Sorts by operation, in the order of `OPS`, then by size."""
    op, low, _ = item[0]
    return OPS.index(op) if op in OPS else len(OPS), op, low


def _count(value: float | None) -> int:
    """A sum of integers."""
    return round(value or 0.0)


def _times(values: Sequence[float | None]) -> list[float | None]:
    """Sums of microseconds, whose parts are whole nanoseconds."""
    return [None if value is None else round(value, 3) for value in values]
