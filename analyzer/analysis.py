"""The analysis of a trace: scan every rank, join, measure, walk the critical paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.engine.engine import EmbeddedEngine
from ddltrace.analyzer.events.event_columns import BoolArray
from ddltrace.analyzer.events.interval_sets import length
from ddltrace.analyzer.events.own_work import own_work
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.formatting.units import share_text
from ddltrace.analyzer.importers.straggler_analysis.operations import WORKERS_LABEL
from ddltrace.analyzer.joined.analyzed import Analyzed
from ddltrace.analyzer.joined.critical_path import Blocks, Path, PathFinder, Window
from ddltrace.analyzer.joined.dependencies import find_graph
from ddltrace.analyzer.joined.executions import Executions, find_executions
from ddltrace.analyzer.joined.join import Joined, join
from ddltrace.analyzer.joined.rank_paths import describe_ranks
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.measures.bandwidth import cost_fits, link_fits, size_bins
from ddltrace.analyzer.measures.breakdown import FloatArray, ratio
from ddltrace.analyzer.measures.collectives import collective_rows, in_steps, joining, p2p_rows
from ddltrace.analyzer.measures.device_queues import device_queues
from ddltrace.analyzer.measures.failures import find_failure
from ddltrace.analyzer.measures.hangs import find_hangs, find_standstill, has_lasted
from ddltrace.analyzer.measures.ideal_job import ideal_job
from ddltrace.analyzer.measures.idle import idle_shares
from ddltrace.analyzer.measures.job_facts import job_facts
from ddltrace.analyzer.measures.operation_rows import kernel_rows, operator_rows
from ddltrace.analyzer.measures.path_parts import path_copies, path_parts, path_totals
from ddltrace.analyzer.measures.pipelines import pipelines
from ddltrace.analyzer.measures.rank_measures import measure_ranks
from ddltrace.analyzer.measures.resources import resource_rows
from ddltrace.analyzer.measures.root_causes import RootCauseFinder
from ddltrace.analyzer.measures.savings import SavingsFinder
from ddltrace.analyzer.measures.slow_steps import slow_steps
from ddltrace.analyzer.measures.steps import Steps, find_steps
from ddltrace.analyzer.measures.stragglers import straggler_rows
from ddltrace.analyzer.measures.tensors import tensor_rows
from ddltrace.analyzer.measures.traffic import traffic_rows
from ddltrace.analyzer.model import (
    Analysis,
    ClockFacts,
    PathPart,
    Pipeline,
    RankClockFacts,
    RootCause,
    Savings,
    StepRow,
    StepTimes,
    StragglerRow,
    Summary,
    TraceFacts,
    Waiting,
)
from ddltrace.analyzer.report.advice import find_findings
from ddltrace.analyzer.trace.align import SHARED, worst_residual
from ddltrace.analyzer.trace.step_selection import select_in_store
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.run_info import PARTS_LABEL

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.analyzer.trace.step_selection import StepSelection

_STRAGGLERS_REPLAYED: Final = 32
_MOST_BESIDE: Final = 4_000_000
"""In a trace with more events, tensors and critical paths are not found at the same time in one
process: both need memory for every event."""

_UNRECORDED_WORTH_SAYING: Final = 0.01
_CLOCK_ERROR_NS: Final = 200_000
"""In the public traces of StragglerAnalysis, computations start up to 0.13 ms before the end of the
receive that they depend on."""


def analyze(trace: Trace, wanted: range | None = None) -> Analysis:
    """Measures a trace; see `analyze_in_full`."""
    return analyze_in_full(trace, wanted).analysis


def analyze_in_full(trace: Trace, wanted: range | None = None) -> Analyzed:
    """Measures a trace.

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
        # A step more on both sides: ranks are not in the same step at the same time.
        trace = trace.within(range(selection.steps.start - 1, selection.steps.stop + 1))
        wanted = selection.steps
    scans = scan_ranks(trace)
    origin_ns = _origin(scans) if selection is None else selection.origin_ns
    joined = join(trace, {rank: scan.messages for rank, scan in scans.items()})
    steps = find_steps(scans, joined, wanted)
    if selection is not None:
        steps = replace(steps, rule=selection.rule)
    if wanted is not None and not len(steps):
        raise TraceError(_no_such_steps(trace, scans, selection, wanted))
    measured = measure_ranks(trace, scans, joined, steps, selected=wanted is not None)
    rank_steps = measured.steps
    hangs = find_hangs(trace, scans, joined, origin_ns)
    failure = find_failure(trace, hangs, origin_ns)
    if failure is not None:
        hangs = tuple(hang for hang in hangs if has_lasted(hang))
    steady = steps.number[steps.steady]
    counted = in_steps(rank_steps["step"].astype(np.int64), steady)
    window = counted if len(steps) else np.ones(len(rank_steps["step"]), dtype=bool)
    residual = worst_residual(list(trace.clocks.values()))
    collectives, messages = joined.collectives, joined.messages
    if wanted is None:
        chosen, chosen_messages = np.ones(len(collectives), bool), np.ones(len(messages), bool)
    else:
        chosen = in_steps(collectives.step, steps.number)
        chosen_messages = in_steps(messages.step, steps.number)
    steady_collectives = in_steps(collectives.step, steady) if len(steps) else chosen
    p2p = p2p_rows(joined, chosen_messages, residual)
    with ThreadPoolExecutor(1) as beside:
        tensors = beside.submit(tensor_rows, trace, scans, steady)
        if isinstance(trace.engine, EmbeddedEngine) and _events_of(scans) > _MOST_BESIDE:
            tensors.result()
        paths = find_paths(trace, scans, joined, steps)
    steady_paths = [paths[number] for number in steady.tolist()]
    # Before the trace's facts are collected: it may add a note.
    ideal = ideal_job(trace, steps.number)
    causes = _find_causes(
        scans,
        joined,
        steps,
        straggler_rows(joined, steady_collectives, rank_steps, window, residual),
        steady_paths,
        dependencies_known=ideal is not None,
    )
    executions = find_executions(trace, None if wanted is None else steps.number)
    analysis = Analysis(
        trace=_trace_facts(trace, scans, steps, selection),
        clock=_clock_facts(trace, residual),
        summary=_summary(steps, rank_steps, window),
        joining=joining(joined, chosen, chosen_messages),
        ranks=measured.ranks,
        steps=_step_rows(steps, rank_steps, paths, origin_ns),
        collectives=collective_rows(joined, chosen, residual),
        stragglers=causes.stragglers,
        tensors=tensors.result()[0],
        tensor_course=tensors.result()[1],
        p2p=p2p,
        cost_fits=(
            *cost_fits(trace, scans, joined, chosen),
            *link_fits(trace, scans, joined, chosen_messages),
        ),
        message_sizes=size_bins(joined, chosen_messages),
        traffic=traffic_rows(joined, p2p, chosen),
        critical_path=causes.parts,
        savings=causes.savings,
        pipelines=causes.pipelines,
        waiting=causes.waiting,
        root_causes=causes.root_causes,
        hangs=hangs,
        failure=failure,
        standstill=None if hangs else find_standstill(trace, scans),
        findings=(),
        resources=resource_rows(trace),
        slow_steps=slow_steps(steps, paths),
        idle=measured.idle,
        ideal_job=ideal,
        rank_steps=rank_steps,
        **_operations(trace, executions, rank_steps, steps, wanted),
    )
    path = None if PARTS_LABEL in trace.run.labels else trace.path
    facts = job_facts(
        trace,
        scans,
        joined,
        steady,
        tuple(part.name for part in causes.parts if part.category == "update" and part.name),
    )
    analysis = replace(analysis, findings=find_findings(analysis, facts, path))
    return Analyzed(analysis, joined, paths, executions)


def _operations(
    trace: Trace,
    executions: Executions,
    rank_steps: Mapping[str, FloatArray],
    steps: Steps,
    wanted: range | None,
) -> dict[str, Any]:
    """The tables of kernels, operators and device queues."""
    count = len(rank_steps["step"]) if len(steps) else 0
    queues = device_queues(trace, None if wanted is None else steps.number)
    return {
        "kernels": kernel_rows(executions, count),
        "operators": operator_rows(executions, count),
        **queues._asdict(),
    }


class _Causes(NamedTuple):
    """Results of the dependencies between ranks."""

    stragglers: tuple[StragglerRow, ...]
    parts: tuple[PathPart, ...]
    savings: Savings | None
    pipelines: tuple[Pipeline, ...]
    waiting: Waiting
    root_causes: tuple[RootCause, ...]


def _find_causes(
    scans: Mapping[int, RankScan],
    joined: Joined,
    steps: Steps,
    stragglers: tuple[StragglerRow, ...],
    paths: Sequence[Path],
    *,
    dependencies_known: bool,
) -> _Causes:
    """Attributes waiting to its causes, and replays the steady steps without them.

    Args:
        scans: Rank -> its scan.
        joined: All messages.
        steps: All steps.
        stragglers: Rows without savings, which are filled in for the worst stragglers.
        paths: The critical paths of the steady steps.
        dependencies_known: See `SavingsFinder`.
    """
    graph = find_graph(scans, joined, tolerance_ns=_CLOCK_ERROR_NS if dependencies_known else 0)
    work = {rank: own_work(scan) for rank, scan in scans.items()}
    delayed = RootCauseFinder(scans, joined, graph, steps, work)
    parts = path_parts(paths)
    if not paths:
        return _Causes(stragglers, parts, None, (), delayed.waiting(), delayed.causes(None))
    finder = SavingsFinder(scans, joined, graph, steps, work, dependencies_known=dependencies_known)
    saved = finder.by_rank([row.rank for row in stragglers[:_STRAGGLERS_REPLAYED]])
    alone = finder.by_part(parts, paths)
    return _Causes(
        stragglers=tuple(replace(row, saves_us=saved.get(row.rank)) for row in stragglers),
        parts=tuple(replace(part, alone_us=us) for part, us in zip(parts, alone, strict=True)),
        savings=finder.by_category(),
        pipelines=pipelines(scans, joined, graph, steps.number[steps.steady]),
        waiting=delayed.waiting(),
        root_causes=delayed.causes(finder),
    )


def _events_of(scans: Mapping[int, RankScan]) -> int:
    return sum(scan.events for scan in scans.values())


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


def _step_rows(
    steps: Steps, rank_steps: Mapping[str, FloatArray], paths: Mapping[int, Path], origin_ns: int
) -> tuple[StepRow, ...]:
    which = np.searchsorted(steps.number, rank_steps["step"]) if len(steps) else None
    sums = {
        name: np.bincount(which, weights=rank_steps[name], minlength=len(steps))
        for name in ("wall_ns", "compute_ns", "comm_ns", "overlap_ns", "exposed_ns", "idle_ns")
        if which is not None
    }
    rows = []
    for i, number in enumerate(steps.number.tolist()):
        wall = float(sums["wall_ns"][i])
        rows.append(
            StepRow(
                step=number,
                start_us=int(steps.start[i] - origin_ns) / 1e3,
                wall_us=int(steps.end[i] - steps.start[i]) / 1e3,
                ranks=int(steps.ranks[i]),
                steady=bool(steps.steady[i]),
                overlap_ratio=ratio(float(sums["overlap_ns"][i]), float(sums["comm_ns"][i])),
                compute_share=ratio(float(sums["compute_ns"][i]), wall),
                exposed_comm_share=ratio(float(sums["exposed_ns"][i]), wall),
                idle_share=ratio(float(sums["idle_ns"][i]), wall),
                critical_path=path_totals(paths[number]),
                copies=path_copies(paths[number]),
            )
        )
    return tuple(rows)


def find_paths(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, steps: Steps
) -> dict[int, Path]:
    """The critical path of every step: step number -> path."""

    @cache
    def blocks(rank: int) -> Blocks:
        return scans[rank].path_blocks()

    names = cache(trace.tensor_names)
    finder = PathFinder(joined, blocks, partial(describe_ranks, trace, scans), names)
    bounds = (steps.start.tolist(), steps.end.tolist(), steps.last_rank.tolist())
    windows = [Window(*bound) for bound in zip(*bounds, strict=True)]
    return dict(zip(steps.number.tolist(), finder.find(windows), strict=True))


def _unrecorded_notes(scans: Mapping[int, RankScan], *, operations_only: bool) -> list[str]:
    """Says how much time of ranks is not recorded, and how it is counted."""
    missing = {rank: length(scan.activity.unrecorded) for rank, scan in scans.items()}
    ranks = [rank for rank, ns in missing.items() if ns]
    whole = sum(scans[rank].last - scans[rank].first for rank in ranks)
    share = sum(missing.values()) / whole if whole else 0.0
    if share < _UNRECORDED_WORTH_SAYING:
        return []
    missing_text = f"for {share_text(share)} of the time of {len(ranks)} ranks nothing is recorded"
    if operations_only:
        return [f"{missing_text}: it counts as waiting, since all work is recorded as operations"]
    return [
        f"{missing_text}, neither of the device nor of the host: they may have worked then, or "
        "waited, so savings are known within a range only where that matters"
    ]


def _trace_facts(
    trace: Trace, scans: Mapping[int, RankScan], steps: Steps, selection: StepSelection | None
) -> TraceFacts:
    run = trace.run
    notes = list(trace.notes)
    if selection is not None and selection.note is not None:
        notes.append(selection.note)
    for scan in scans.values():
        if scan.damaged:
            notes.append(f"rank {scan.rank}: {scan.damaged} events left out: impossible times")
        if scan.backwards:
            notes.append(
                f"rank {scan.rank}: {scan.backwards} events end before they start: "
                "taken as instants"
            )
    costs = [info.cost for info in run.ranks if info.cost]
    if costs:
        worst = max(costs, key=lambda cost: cost["ratio"])
        notes.append(
            f"{worst['steps']} steps were left unrecorded, to measure what recording costs: a step "
            f"takes {worst['ratio']:.3f} times as long with it "
            f"(95 % interval {worst['low']:.3f} to {worst['high']:.3f})"
        )
    notes += _unrecorded_notes(scans, operations_only=WORKERS_LABEL in run.labels)
    partly = steps.number[steps.ranks < steps.ranks.max(initial=0)]
    if len(partly):
        notes.append(
            f"{len(partly)} of {len(steps)} steps were completed by some ranks only "
            f"(first: step {partly[0]})"
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
        events=_events_of(scans) if selection is None else selection.events,
        dropped=sum(info.dropped for info in run.ranks),
        lost_bytes=sum(info.lost_bytes for info in run.ranks),
        notes=tuple(dict.fromkeys(notes)),
    )


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
