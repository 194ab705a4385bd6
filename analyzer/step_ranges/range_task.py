"""Measures one range of steps: a task of the engine, whose result is small."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddltrace.analyzer.engine.part_tasks import PartWithData
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measure_steps import Request, measure_steps
from ddltrace.analyzer.measures.distribution import with_rounded
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.measured import Measured
from ddltrace.analyzer.measures.slow_steps import PathSums
from ddltrace.analyzer.measures.steps import find_steps
from ddltrace.analyzer.measures.stragglers import Lateness

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace


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


def measure_range(part: StepRange) -> Measured:
    """Measures a range of steps; its distributions are rounded, and its paths summed."""
    trace: Trace = part.trace
    scans = scan_ranks(trace)
    joined = join(trace, {rank: scan.messages for rank, scan in scans.items()})
    steps = find_steps(scans, joined, part.steps)
    request = Request(
        selected=True,
        origin_ns=part.origin_ns,
        dependencies_known=ideal_job(trace, steps.number) is not None,
        most_parts=None,
        most_periods=part.most_periods,
        continues=part.continues,
        at_end=part.at_end,
    )
    return _reduced(measure_steps(trace, scans, joined, steps, request).measured)


def _reduced(measured: Measured) -> Measured:
    """The same without what grows with the number of messages."""
    steady = measured.steady
    lateness = {
        rank: replace(late, lateness=late.lateness.rounded())
        for rank, late in steady.lateness.ranks.items()
    }
    sums: dict[int, PathSums] = {
        step: measured.path_sums(step).compact() for step in measured.steps.number.tolist()
    }
    return replace(
        measured,
        path_sums=sums.__getitem__,
        collectives={kind: with_rounded(each) for kind, each in measured.collectives.items()},
        links={pair: with_rounded(each) for pair, each in measured.links.items()},
        fit_samples={kind: each.rounded() for kind, each in measured.fit_samples.items()},
        steady=replace(steady, lateness=Lateness(lateness, steady.lateness.took_part)),
    )
