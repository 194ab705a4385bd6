"""The analysis of a trace: at once, or, of a long trace, in ranges of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.findings.advice import find_findings
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.job_facts import FINDINGS
from ddltrace.analyzer.measures.measure import Found, JoinedSteps, Whole
from ddltrace.analyzer.measures.rank_measures import RANKS
from ddltrace.analyzer.measures.steps import find_steps, in_steps
from ddltrace.analyzer.model import MEASURES, Analysis, Analyzed, measure_steps
from ddltrace.analyzer.step_ranges import measure_in_ranges
from ddltrace.analyzer.trace.align import worst_residual
from ddltrace.analyzer.trace.step_selection import divide, select_in_store, steps_in_ranges
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import PARTS_LABEL

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection


def analyze(trace: Trace, wanted: range | None = None) -> Analysis:
    """Measures a trace, however long it is.

    The measures of steps that are too many for memory are merged from those of ranges of steps,
    which are tasks of the trace's engine.

    Args:
        wanted: Only these steps; by default the whole trace, summarized over steady steps.

    Raises:
        TraceError: The trace has none of the steps wanted, or is long and has no completed step.
    """
    selection = steps_in_ranges(trace.step_selection, wanted)
    if selection is None:
        return analyze_in_full(trace, wanted).analysis
    measured = measure_in_ranges(trace, selection, divide(selection))
    return _assembled(trace, measured, selection)


def analyze_with_paths(trace: Trace, wanted: range | None = None) -> Analyzed:
    """As `analyze`, with critical paths, messages and operations.

    Of steps that are too many for memory, these are the ones of their last range.

    Args:
        wanted: See `analyze`.

    Raises:
        TraceError: See `analyze`.
    """
    selection = steps_in_ranges(trace.step_selection, wanted)
    if selection is None:
        return analyze_in_full(trace, wanted)
    analysis = analyze(trace, wanted)
    last = next(steps for steps in divide(selection) if analysis.steps[-1].step in steps)
    return replace(analyze_in_full(trace, last), analysis=analysis)


def analyze_in_full(trace: Trace, wanted: range | None = None) -> Analyzed:
    """Measures a trace and keeps the intermediate results.

    Args:
        wanted: Only these steps; by default the whole trace, summarized over steady steps. Of a
            trace too long for that, the last steps, see `Trace.step_selection`.

    Raises:
        TraceError: The trace has none of the steps wanted.
    """
    selection, measured = join_steps(trace, wanted)
    analysis = _assembled(measured.trace, measure_steps(measured), selection)
    return Analyzed(analysis, measured.joined, measured.paths, measured.executions)


def join_steps(
    trace: Trace, wanted: range | None = None
) -> tuple[StepSelection | None, JoinedSteps]:
    """Reads the steps of a trace and joins their messages: what measures are computed from.

    Args:
        wanted: As in `analyze_in_full`.

    Returns:
        Of a trace that is not read as a whole, the steps that are; and the steps.

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
    return selection, JoinedSteps(
        trace,
        scans,
        joined,
        steps,
        selected=wanted is not None,
        origin_ns=origin_ns,
        # It may add a note to the trace, before the trace's facts are collected.
        dependencies_known=ideal_job(trace, steps.number) is not None,
    )


def _assembled(trace: Trace, found: Found, selection: StepSelection | None) -> Analysis:
    """The values of all measures.

    Args:
        found: What the measures found in its steps.
        selection: Of a trace that was not read as a whole, the steps that were.
    """
    steps, rank_steps = found.steps, found.of(RANKS).steps
    counted = in_steps(rank_steps["step"].astype(np.int64), steps.number[steps.steady])
    window = counted if len(steps) else np.ones(len(rank_steps["step"]), dtype=bool)
    residual = worst_residual(list(trace.clocks.values()))
    whole = Whole(trace, selection, found, rank_steps, window, residual)
    analysis = Analysis(**{name: each.value(whole) for name, each in MEASURES.items()})
    path = None if PARTS_LABEL in trace.run.labels else trace.path
    return replace(analysis, findings=find_findings(analysis, found.of(FINDINGS), path))


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
