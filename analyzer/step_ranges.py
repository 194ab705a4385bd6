"""Measures a trace that is too long for memory, one range of steps after the other.

Each range is a task of the engine: it reads the range's steps of all ranks, joins their messages,
walks their critical paths and returns sums. So the memory of a task is that of one range, workers
share all of the work, and the process of the command only adds up.

Counts, bytes, times and the values of single steps are sums and lists, and as exact as if all steps
had been measured at once. Medians and percentiles over messages are those of `Distribution`, within
0.5 %. For a parameter, a median is the median of those of the ranges; a 95th percentile of a kernel
or operator is their mean. Means per step are means over the ranges, weighted by their steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ddltrace.analyzer.engine.engine import EmbeddedEngine, PartWithData, Progress, map_parts
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.measure import MAX_PERIODS, Found, JoinedSteps
from ddltrace.analyzer.measures.steps import (
    MAX_WARMUP,
    RULE,
    RULE_ONE,
    Steps,
    count_warmup,
    find_steps,
)
from ddltrace.analyzer.model import COMPUTED, measure_steps
from ddltrace.analyzer.trace.step_selection import RULE_ASKED
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection


@dataclass(frozen=True)
class StepRange(PartWithData["Trace"]):
    """What a task needs to measure a range of steps.

    Attributes:
        trace: The trace with these steps and their neighbours.
        steps: The steps.
        origin_ns: Where the whole trace begins, ns on rank 0's clock.
        continues: Whether the steps before these are measured as well.
        most_periods: Periods into which the course of tensors is divided.
        at_end: Whether these are the last steps of the trace.
    """

    steps: range
    origin_ns: int
    continues: bool
    most_periods: int
    at_end: bool


def measure_range(part: StepRange) -> Found:
    """Measures a range of steps."""
    trace: Trace = part.trace
    scans = scan_ranks(trace)
    joined = join(trace, {rank: scan.messages for rank, scan in scans.items()})
    steps = find_steps(scans, joined, part.steps)
    return measure_steps(
        JoinedSteps(
            trace,
            scans,
            joined,
            steps,
            selected=True,
            origin_ns=part.origin_ns,
            dependencies_known=ideal_job(trace, steps.number) is not None,
            in_ranges=True,
            most_periods=part.most_periods,
            continues=part.continues,
            at_end=part.at_end,
        )
    )


def measure_in_ranges(trace: Trace, selection: StepSelection, ranges: Sequence[range]) -> Found:
    """Measures steps of a trace.

    Args:
        selection: The steps: all, whose warm-up is found, or those that were asked for.
        ranges: The same divided, see `divide`.

    Raises:
        TraceError: No step was completed.
    """
    merger = RangeMerger()
    # Whether the first steps are warm-up depends on later ones.
    first: list[tuple[range, Found]] = []
    completed = 0
    every = _measured(trace, selection, ranges, len(ranges))
    for steps, part in zip(ranges, every, strict=True):
        if completed < MAX_WARMUP:
            first.append((steps, part))
        else:
            merger.add(part)
        completed += len(part.steps)
    steady = merger.first_steady_step([part for _, part in first])
    if steady is None:
        raise TraceError(f"{trace.name} has no completed steps")
    for steps, part in first:
        number = part.steps.number
        if selection.rule == RULE_ASKED or not len(number) or number[0] >= steady:
            merger.add(part)
        elif number[-1] < steady:
            merger.add(as_warmup(part))
        else:
            halves = [range(steps.start, steady), range(steady, steps.stop)]
            before, after = _measured(trace, selection, halves, len(ranges))
            merger.add(as_warmup(before))
            merger.add(after)
    measured = merger.result()
    if selection.rule != RULE_ASKED:
        return measured
    return replace(measured, steps=replace(measured.steps, rule=RULE_ASKED))


def _measured(
    trace: Trace, selection: StepSelection, ranges: Sequence[range], count: int
) -> Iterator[Found]:
    """The measures of ranges of steps, in order.

    Args:
        selection: Has the steps of the trace.
        count: Number of ranges into which the trace is divided.
    """
    last = selection.whole.stop
    parts = [
        StepRange(
            trace=trace.of_steps(
                range(steps.start - 1, steps.stop + 1), later_stepless=steps.stop == last
            ),
            steps=steps,
            origin_ns=selection.origin_ns,
            continues=steps.start > selection.steps.start,
            most_periods=max(1, MAX_PERIODS // count),
            at_end=steps.stop == last,
        )
        for steps in ranges
    ]
    doing = "analyzing ranges of steps"
    found = map_parts(trace, measure_range, parts, doing, one_at_a_time=True)
    if not isinstance(trace.engine, EmbeddedEngine):
        yield from found
        return
    with Progress(doing, len(parts)) as progress:
        for measured in found:
            progress.advance()
            yield measured


class RangeMerger:
    """Merges what all measures found in ranges of steps, which are added in any order."""

    def __init__(self) -> None:
        self._ranges: list[Found] = []
        self._mergers = {each.name: each.merge() for each in COMPUTED if each.merge is not None}

    def first_steady_step(self, others: Sequence[Found]) -> int | None:
        """Number of the first step that is not warm-up.

        Args:
            others: Ranges that have not been added yet.

        Returns:
            The number; None if no step was completed.
        """
        ranges = [*self._ranges, *others]
        number = np.concatenate([each.steps.number for each in ranges])
        if len(number) < 2:
            return int(number[0]) if len(number) else None
        walls = np.concatenate([each.steps.end - each.steps.start for each in ranges])
        messages = np.concatenate([each.messages for each in ranges])
        size = np.concatenate([each.bytes for each in ranges])
        order = np.argsort(number)
        return int(number[order][count_warmup(walls[order], messages[order], size[order])])

    def add(self, found: Found) -> None:
        """Adds a range."""
        of = {"all"}
        if len(found.steps):
            of |= {"steps", "steady"} if found.steps.steady.all() else {"steps"}
            self._ranges.append(replace(found, parts={}))
        for measure in COMPUTED:
            if measure.of in of:
                self._mergers[measure.name].add(found.parts[measure.name], found.steps)

    def result(self) -> Found:
        """What was found in all ranges; there is a completed step."""
        number = np.concatenate([each.steps.number for each in self._ranges])
        order = np.argsort(number)
        return Found(
            steps=_all_steps([each.steps for each in self._ranges]),
            messages=np.concatenate([each.messages for each in self._ranges])[order],
            bytes=np.concatenate([each.bytes for each in self._ranges])[order],
            parts={name: merger.result() for name, merger in self._mergers.items()},
        )


def as_warmup(found: Found) -> Found:
    """What was found in a range whose steps are warm-up."""
    steps = replace(found.steps, steady=np.zeros(len(found.steps), dtype=bool))
    return replace(found, steps=steps)


def _all_steps(parts: Sequence[Steps]) -> Steps:
    whole = Steps.joined(parts)
    whole = whole.keep(np.argsort(whole.number))
    return replace(whole, rule=RULE if len(whole) > 1 else RULE_ONE)
