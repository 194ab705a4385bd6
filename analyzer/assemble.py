"""Assembles the analysis of a trace from the measures of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import BoolArray, FloatArray
from ddltrace.analyzer.formatting.units import agreeing, counted, share_text
from ddltrace.analyzer.importers.kineto.communication_kernels import SUSPECTS_LABEL
from ddltrace.analyzer.importers.straggler_analysis.operations import WORKERS_LABEL
from ddltrace.analyzer.measures.bandwidth import cost_fits
from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.collectives import collective_rows, in_steps, p2p_rows
from ddltrace.analyzer.measures.dimensions import dimension_rows
from ddltrace.analyzer.measures.idle import idle_shares
from ddltrace.analyzer.measures.launch_gaps import launch_gaps
from ddltrace.analyzer.measures.measured import Measured, RankFacts
from ddltrace.analyzer.measures.path_parts import MOST_PARTS
from ddltrace.analyzer.measures.resources import resource_rows
from ddltrace.analyzer.measures.slow_steps import slow_steps
from ddltrace.analyzer.measures.steps import Steps
from ddltrace.analyzer.measures.stragglers import straggler_rows
from ddltrace.analyzer.model import (
    Analysis,
    ClockFacts,
    IdealJob,
    RankClockFacts,
    StepTimes,
    Summary,
    TraceFacts,
)
from ddltrace.analyzer.report.advice import find_findings
from ddltrace.analyzer.trace.align import SHARED, worst_residual
from ddltrace.tracer.trace.run_info import PARTS_LABEL

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection

_UNRECORDED_WORTH_SAYING: Final = 0.01


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
        trace=_trace_facts(trace, measured.facts, steps, selection),
        clock=_clock_facts(trace, residual),
        summary=_summary(steps, rank_steps, window),
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


def _summary(steps: Steps, rank_steps: Mapping[str, FloatArray], counted: BoolArray) -> Summary:
    wall = float(rank_steps["wall_ns"][counted].sum())

    def share(column: str) -> float | None:
        return ratio(float(rank_steps[column][counted].sum()), wall)

    own = rank_steps["wall_ns"][counted] if len(steps) else np.empty(0)
    return Summary(
        step_us=_times((steps.end - steps.start)[steps.steady] / 1e3),
        rank_step_us=_times(own / 1e3),
        overlap_ratio=ratio(
            float(rank_steps["overlap_ns"][counted].sum()),
            float(rank_steps["comm_ns"][counted].sum()),
        ),
        compute_share=share("compute_ns"),
        exposed_comm_share=share("exposed_ns"),
        copy_share=share("copy_ns"),
        idle_share=share("idle_ns"),
        sync_overhead_share=share("sync_ns"),
        update_overhead_share=share("update_ns"),
        data_share=share("data_ns"),
        idle=idle_shares(share),
        steps=int(steps.steady.sum()),
        warmup_steps=int((~steps.steady).sum()),
        rule=steps.rule,
    )


def _times(values: FloatArray) -> StepTimes:
    if not len(values):
        return StepTimes(None, None, None)
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return StepTimes(p50=p50, p95=p95, mean=float(values.mean()))


def _unrecorded_notes(facts: Mapping[int, RankFacts], *, operations_only: bool) -> list[str]:
    """Says how much time of ranks is not recorded, and how it is counted."""
    ranks = [of_rank for of_rank in facts.values() if of_rank.unrecorded_ns]
    whole = sum(of_rank.span_ns for of_rank in ranks)
    share = sum(of_rank.unrecorded_ns for of_rank in ranks) / whole if whole else 0.0
    if share < _UNRECORDED_WORTH_SAYING:
        return []
    missing_text = (
        f"for {share_text(share)} of the time of {counted(len(ranks), 'rank')} nothing is recorded"
    )
    if operations_only:
        return [f"{missing_text}: it counts as waiting, since all work is recorded as operations"]
    return [
        f"{missing_text}, neither of the device nor of the host: they may have worked then, or "
        "waited, so savings are known within a range only where that matters"
    ]


def _trace_facts(
    trace: Trace, facts: Mapping[int, RankFacts], steps: Steps, selection: StepSelection | None
) -> TraceFacts:
    run = trace.run
    notes = list(trace.notes)
    if selection is not None and selection.note is not None:
        notes.append(selection.note)
    for rank, of_rank in facts.items():
        least = "at least " if of_rank.is_partial else ""
        if of_rank.damaged:
            count = f"{least}{of_rank.damaged}"
            notes.append(f"rank {rank}: {count} events left out: impossible times")
        if of_rank.backwards:
            count = f"{least}{of_rank.backwards}"
            notes.append(f"rank {rank}: {count} events end before they start: taken as instants")
    costs = [info.cost for info in run.ranks if info.cost]
    if costs:
        worst = max(costs, key=lambda cost: cost["ratio"])
        notes.append(
            f"{worst['steps']} steps were left unrecorded, to measure what recording costs: a step "
            f"takes {worst['ratio']:.3f} times as long with it "
            f"(95 % interval {worst['low']:.3f} to {worst['high']:.3f})"
        )
    notes += _unrecorded_notes(facts, operations_only=WORKERS_LABEL in run.labels)
    generation = trace.generations_of(steps.number)
    most = np.zeros(int(generation.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(most, generation, steps.ranks)
    partly = steps.number[steps.ranks < most[generation]]
    if len(partly):
        notes.append(
            f"{len(partly)} of {len(steps)} steps {agreeing(len(partly), 'was')} completed by some "
            f"ranks only (first: step {partly[0]})"
        )
    return TraceFacts(
        name=trace.name,
        world_size=max([len(trace.ranks), *(info.world_size for info in run.ranks)]),
        ranks=tuple(trace.ranks),
        hosts=tuple(sorted({info.host for info in run.ranks})),
        steps=len(steps),
        source=run.source,
        status="partial" if trace.damage and run.status == "complete" else run.status,
        exit_status=run.exit_status,
        level=run.level,
        command=tuple(map(str, run.command)),
        events=(
            sum(of_rank.events for of_rank in facts.values())
            if selection is None
            else selection.events
        ),
        dropped=sum(info.dropped for info in run.ranks),
        lost_bytes=sum(info.lost_bytes for info in run.ranks),
        notes=tuple(dict.fromkeys(notes)),
        suspected_communication=_suspects(run.labels.get(SUSPECTS_LABEL)),
    )


def _suspects(label: Any) -> dict[str, int]:
    """The kernels that may communicate, from a label of the run."""
    counts = label.items() if isinstance(label, dict) else ()
    return {str(name): count for name, count in counts if type(count) is int}


def _clock_facts(trace: Trace, residual: float | None) -> ClockFacts:
    clocks = list({clock.rank: clock for clock in trace.clocks.values()}.values())
    methods: Sequence[str] = sorted({clock.method for clock in clocks if clock.method != SHARED})
    return ClockFacts(
        method=", ".join(methods) or SHARED,
        max_residual_us=None if residual is None else residual / 1e3,
        ranks=tuple(
            RankClockFacts(
                rank=clock.rank,
                offset_us=clock.offset_ns / 1e3,
                drift_ppm=clock.drift * 1e6,
                residual_us=None if clock.residual_ns is None else clock.residual_ns / 1e3,
                method=clock.method,
            )
            for clock in sorted(clocks, key=lambda clock: clock.rank)
        ),
    )
