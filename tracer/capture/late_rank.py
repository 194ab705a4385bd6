"""Finds a rank that is late, in steps that are recorded for this (``--trigger 'late>10ms'``).

An all-reduce, an all-gather or a reduce-scatter ends on all ranks at about the same time, so the
rank that begins it last spends least time in it. The times that the ranks spend in the collectives
of a step therefore tell which one is late, and by how much, without a common clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from ddltrace.tracer.record.recorder import KIND_CODE
from ddltrace.tracer.trace.schema import OPS

if TYPE_CHECKING:
    import pyarrow as pa

    from ddltrace.tracer.trace.arrow_arrays import Integers
    from ddltrace.tracer.trace.run_info import GroupInfo

LOOK: Final = "a look for a late rank"
"""Reason of the order to record the steps."""
STEPS: Final = 10
_LATE_IN: Final = 0.8
"""Part of the steps in which a rank has to be late."""

Times: TypeAlias = Mapping[str, Mapping[str, int]]
"""Group -> step -> ns in its collectives; the steps are keys of JSON."""


class MessageTimes:
    """The times that this rank spends in collectives, in the steps of a look."""

    def __init__(self) -> None:
        self._steps = range(0)
        self._rows: list[tuple[Sequence[str], Integers]] = []

    def follow(self, steps: range) -> None:
        """Keeps the times of these steps, and no others."""
        self._steps = steps
        self._rows = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds recorded events.

        Args:
            batch: Events of schema `EVENTS`, as `BatchBuilder` makes them.
        """
        if not self._steps:
            return
        columns = [
            batch.column("step").fill_null(-1),
            batch.column("start_ns"),
            batch.column("end_ns").fill_null(-1),
            *(batch.column(name).indices.fill_null(-1) for name in ("group", "op", "kind")),
        ]
        rows = np.stack([column.to_numpy().astype(np.int64) for column in columns])
        step, _, end, _, op, kind = rows
        kept = (step >= self._steps.start) & (step < self._steps.stop) & (end >= 0)
        kept &= (kind == KIND_CODE["message"]) & (op >= 0) & (op < OPS.index("send"))
        self._rows.append((batch.column("group").dictionary.to_pylist(), rows[:4, kept]))

    def sums(self, groups: Sequence[GroupInfo]) -> Times:
        """The times, those of messages that overlap once.

        Args:
            groups: The groups of this rank; equal names of groups with different ranks are told
                apart by their first ranks.
        """
        first_of = {group.name: group.ranks[0] for group in groups if group.ranks}
        found: dict[str, dict[str, int]] = {}
        rows = list(self._rows)
        if not rows:
            return found
        names = rows[-1][0]  # the dictionary only grows
        step, start, end, group = np.concatenate([part for _, part in rows], axis=1)
        for number in np.unique(group).tolist():
            if number < 0 or names[number] not in first_of:
                continue
            of_step = found[f"{names[number]} of {first_of[names[number]]}"] = {}
            for one in np.unique(step[group == number]).tolist():
                mine = (group == number) & (step == one)
                of_step[str(one)] = _union(start[mine], end[mine])
        return found


def _union(start: Integers, end: Integers) -> int:
    order = np.argsort(start)
    start, latest = start[order], np.maximum.accumulate(end[order])
    covered = np.concatenate([start[:1], latest[:-1]])
    return int(np.maximum(latest - np.maximum(start, covered), 0).sum())


def find_late_rank(times: Mapping[int, Times], limit_ns: float) -> tuple[int, float] | None:
    """Finds the rank that is late in most steps.

    Args:
        times: Rank -> the times of its collectives.
        limit_ns: By how much it has to be late in a step.

    Returns:
        The rank that is late by most, and by how much: the median over the steps, in ns. None
        without one.
    """
    found: list[tuple[float, int]] = []
    for group in sorted({group for of_rank in times.values() for group in of_rank}):
        ranks = sorted(rank for rank, of_rank in times.items() if group in of_rank)
        steps = set.intersection(*(set(times[rank][group]) for rank in ranks))
        if len(ranks) < 2 or not steps:
            continue
        table = np.array([[times[rank][group][step] for rank in ranks] for step in sorted(steps)])
        last = table.argmin(axis=1)
        for place in np.unique(last).tolist():
            late_by = np.median(np.delete(table, place, axis=1), axis=1) - table[:, place]
            is_late = (last == place) & (late_by > limit_ns)
            if is_late.sum() >= _LATE_IN * max(len(steps), STEPS - 1):
                found.append((statistics.median(late_by[is_late].tolist()), ranks[place]))
    return (max(found)[1], max(found)[0]) if found else None
