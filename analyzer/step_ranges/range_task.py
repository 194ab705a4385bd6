"""Measures one range of steps: a task of the engine, whose result is small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddltrace.analyzer.engine.part_tasks import PartWithData
from ddltrace.analyzer.joined.join import join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.measure import Found, JoinedSteps
from ddltrace.analyzer.measures.steps import find_steps
from ddltrace.analyzer.model import measure_steps

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
