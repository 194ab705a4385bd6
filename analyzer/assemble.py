"""Assembles the analysis of a trace from the measures of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddltrace.analyzer.findings.advice import find_findings
from ddltrace.analyzer.measures.bandwidth import cost_fits
from ddltrace.analyzer.measures.clock_facts import clock_facts
from ddltrace.analyzer.measures.collectives import collective_rows, in_steps, p2p_rows
from ddltrace.analyzer.measures.dimensions import dimension_rows
from ddltrace.analyzer.measures.ideal_job import IdealJob
from ddltrace.analyzer.measures.launch_gaps import launch_gaps
from ddltrace.analyzer.measures.measured import Measured
from ddltrace.analyzer.measures.nccl import nccl_measures
from ddltrace.analyzer.measures.path_parts import MOST_PARTS
from ddltrace.analyzer.measures.resources import resource_rows
from ddltrace.analyzer.measures.slow_steps import slow_steps
from ddltrace.analyzer.measures.stragglers import straggler_rows
from ddltrace.analyzer.measures.summary import summary
from ddltrace.analyzer.measures.trace_facts import trace_facts
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.trace.align import worst_residual
from ddltrace.tracer.trace.run_info import PARTS_LABEL

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection


def assemble(
    trace: Trace, measured: Measured, selection: StepSelection | None, ideal: IdealJob | None
) -> Analysis:
    """Assembles an analysis.

    Args:
        trace: The trace.
        measured: The measures of its steps.
        selection: Of a trace that was not read as a whole, the steps that were.
        ideal: The job compared with the ideal job.
    """
    steps, rank_steps, steady = measured.steps, measured.rank_steps, measured.steady
    counted = in_steps(rank_steps["step"].astype(np.int64), steps.number[steps.steady])
    window = counted if len(steps) else np.ones(len(rank_steps["step"]), dtype=bool)
    residual = worst_residual(list(trace.clocks.values()))
    stragglers = straggler_rows(steady.lateness, rank_steps, window, residual)
    saves = steady.straggler_saves
    analysis = Analysis(
        trace=trace_facts(trace, measured.facts, steps, selection),
        clock=clock_facts(trace, residual),
        summary=summary(steps, rank_steps, window),
        joining=measured.joining,
        ranks=measured.ranks,
        steps=measured.rows,
        collectives=collective_rows(measured.collectives, residual),
        stragglers=tuple(replace(row, saves_us=saves.get(row.rank)) for row in stragglers),
        tensors=steady.tensors.rows,
        tensor_course=steady.tensors.course,
        p2p=p2p_rows(measured.links, residual),
        cost_fits=cost_fits(measured.fit_samples),
        message_sizes=measured.sizes,
        traffic=measured.traffic,
        dimensions=dimension_rows(steady.dimensions, int(window.sum())),
        critical_path=steady.parts[:MOST_PARTS],
        critical_path_by_rank=steady.path_ranks,
        savings=steady.savings,
        pipelines=steady.pipelines,
        waiting=steady.waiting,
        root_causes=steady.root_causes,
        hangs=measured.hangs,
        mismatches=measured.mismatches,
        failure=measured.failure,
        standstill=measured.standstill,
        findings=(),
        resources=resource_rows(trace),
        nccl=nccl_measures(trace),
        slow_steps=slow_steps(steps, measured.path_sums),
        idle=measured.idle,
        kernels=measured.kernels,
        operators=measured.operators,
        launch_gaps=launch_gaps(rank_steps, window, measured.operators, measured.queues.copies),
        ideal_job=ideal,
        rank_steps=rank_steps,
        **measured.queues._asdict(),
    )
    path = None if PARTS_LABEL in trace.run.labels else trace.path
    return replace(analysis, findings=find_findings(analysis, steady.facts, path))
