"""Measures a trace that is too long for memory, one range of steps after the other.

Each range is a task of the engine: it reads the range's steps of all ranks, joins their messages,
walks their critical paths and returns sums. So the memory of a task is that of one range, workers
share all of the work, and the process of the command only adds up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddltrace.analyzer.engine.engine import EmbeddedEngine
from ddltrace.analyzer.engine.part_tasks import map_parts
from ddltrace.analyzer.engine.progress import Progress
from ddltrace.analyzer.measures.measure import MAX_PERIODS, Found
from ddltrace.analyzer.measures.steps import MAX_WARMUP
from ddltrace.analyzer.step_ranges.merge import RangeMerger, as_warmup
from ddltrace.analyzer.step_ranges.range_task import StepRange, measure_range
from ddltrace.analyzer.trace.step_selection import RULE_ASKED
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection


def measure_in_ranges(trace: Trace, selection: StepSelection, ranges: Sequence[range]) -> Found:
    """Measures steps of a trace.

    Args:
        trace: The trace.
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
        trace: The trace.
        selection: Has the steps of the trace.
        ranges: The ranges.
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
