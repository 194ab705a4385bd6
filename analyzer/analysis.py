"""The analysis of a trace: at once, or, of a long trace, in ranges of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddltrace.analyzer.assemble import assemble
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measure_steps import Request, measure_steps
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.steps import find_steps
from ddltrace.analyzer.model import Analysis, Analyzed
from ddltrace.analyzer.step_ranges.division import divide, steps_in_ranges
from ddltrace.analyzer.step_ranges.in_ranges import measure_in_ranges
from ddltrace.analyzer.trace.step_selection import select_in_store
from ddltrace.tracer.errors import TraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection


def analyze(trace: Trace, wanted: range | None = None) -> Analysis:
    """Measures a trace, however long it is.

    The measures of steps that are too many for memory are merged from those of ranges of steps,
    which are tasks of the trace's engine.

    Args:
        trace: The trace.
        wanted: Only these steps; by default the whole trace, summarized over steady steps.

    Raises:
        TraceError: The trace has none of the steps wanted, or is long and has no completed step.
    """
    selection = steps_in_ranges(trace, wanted)
    if selection is None:
        return analyze_in_full(trace, wanted).analysis
    measured = measure_in_ranges(trace, selection, divide(selection))
    ideal = ideal_job(trace, measured.steps.number)
    return assemble(trace, measured, selection, ideal)


def analyze_with_paths(trace: Trace, wanted: range | None = None) -> Analyzed:
    """As `analyze`, with critical paths, messages and operations.

    Of steps that are too many for memory, these are the ones of their last range.

    Args:
        trace: The trace.
        wanted: See `analyze`.

    Raises:
        TraceError: See `analyze`.
    """
    selection = steps_in_ranges(trace, wanted)
    if selection is None:
        return analyze_in_full(trace, wanted)
    analysis = analyze(trace, wanted)
    last = next(steps for steps in divide(selection) if analysis.steps[-1].step in steps)
    return replace(analyze_in_full(trace, last), analysis=analysis)


def analyze_in_full(trace: Trace, wanted: range | None = None) -> Analyzed:
    """Measures a trace and keeps the intermediate results.

    Args:
        trace: The trace.
        wanted: Only these steps; by default the whole trace, summarized over steady steps. Of a
            trace too long for that, the last steps, see `Trace.step_selection`.

    Raises:
        TraceError: The trace has none of the steps wanted.
    """
    selection = trace.step_selection
    if selection is None and wanted is not None:
        selection = select_in_store(trace, wanted)
    if selection is not None:
        selection = selection if wanted is None else selection.requested(wanted)
        trace = trace.within(selection.with_neighbours)
        wanted = selection.steps
    scans = scan_ranks(trace)
    origin_ns = _origin(scans) if selection is None else selection.origin_ns
    joined = join(trace, {rank: scan.messages for rank, scan in scans.items()})
    steps = find_steps(scans, joined, wanted)
    if selection is not None:
        steps = replace(steps, rule=selection.rule)
    if wanted is not None and not len(steps):
        raise TraceError(_no_such_steps(trace, scans, selection, wanted))
    # Before the trace's facts are collected: it may add a note.
    ideal = ideal_job(trace, steps.number)
    request = Request(wanted is not None, origin_ns, dependencies_known=ideal is not None)
    found = measure_steps(trace, scans, joined, steps, request)
    analysis = assemble(trace, found.measured, selection, ideal)
    return Analyzed(analysis, joined, found.paths, found.executions)


def _origin(scans: Mapping[int, RankScan]) -> int:
    """The earliest time of the trace, ns on rank 0's clock."""
    return min((scan.first for scan in scans.values() if scan.events), default=0)


def _no_such_steps(
    trace: Trace, scans: Mapping[int, RankScan], selection: StepSelection | None, wanted: range
) -> str:
    numbers = [scan.step for scan in scans.values() if len(scan.step)]
    if selection is not None:
        low, high = selection.whole.start, selection.whole.stop - 1
    elif numbers:
        low, high = min(int(n[0]) for n in numbers), max(int(n[-1]) for n in numbers)
    else:
        return f"{trace.name} has no completed steps: leave out --steps"
    return (
        f"{trace.name} has steps {low} to {high}, none of {wanted.start}:{wanted.stop}; "
        f"try --steps {low}:{high + 1}"
    )
