"""Measures steps of a trace: breakdowns, messages, critical paths, and causes of waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.engine.engine import EmbeddedEngine
from ddltrace.analyzer.events.interval_sets import length
from ddltrace.analyzer.events.own_work import own_work
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.critical_path import Blocks, Path, PathFinder, Window
from ddltrace.analyzer.joined.dependencies import find_graph
from ddltrace.analyzer.joined.executions import Executions, find_executions
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.rank_paths import describe_ranks
from ddltrace.analyzer.measures.bandwidth import collective_samples, link_samples, size_bins
from ddltrace.analyzer.measures.collectives import collective_times, in_steps, joining, link_times
from ddltrace.analyzer.measures.device_queues import device_queues
from ddltrace.analyzer.measures.dimensions import dimension_times
from ddltrace.analyzer.measures.failures import find_failure
from ddltrace.analyzer.measures.hangs import find_hangs, find_standstill, has_lasted
from ddltrace.analyzer.measures.job_facts import job_facts
from ddltrace.analyzer.measures.measured import Measured, SteadyMeasures
from ddltrace.analyzer.measures.mismatches import find_mismatches
from ddltrace.analyzer.measures.operation_rows import kernel_rows, operator_rows
from ddltrace.analyzer.measures.path_parts import (
    MOST_PARTS,
    PathPart,
    PathRank,
    path_parts,
)
from ddltrace.analyzer.measures.pipelines import Pipeline, pipelines
from ddltrace.analyzer.measures.rank_measures import measure_ranks
from ddltrace.analyzer.measures.root_causes import RootCause, RootCauseFinder, Waiting
from ddltrace.analyzer.measures.savings import Savings, SavingsFinder
from ddltrace.analyzer.measures.slow_steps import path_sums
from ddltrace.analyzer.measures.step_rows import step_rows
from ddltrace.analyzer.measures.steps import Steps, messages_in_steps
from ddltrace.analyzer.measures.stragglers import Lateness, find_lateness
from ddltrace.analyzer.measures.tensors import MAX_PERIODS, tensor_times
from ddltrace.analyzer.measures.trace_facts import RankFacts
from ddltrace.analyzer.measures.traffic import traffic_rows

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_STRAGGLERS_REPLAYED: Final = 32
_MOST_BESIDE: Final = 4_000_000
"""In a trace with more events, tensors and critical paths are not found at the same time in one
process: both need memory for every event."""

_CLOCK_ERROR_NS: Final = 200_000
"""In the public traces of StragglerAnalysis, computations start up to 0.13 ms before the end of the
receive that they depend on."""


class Request(NamedTuple):
    """What is measured.

    Attributes:
        selected: Whether only the steps count, and not what lies outside of them.
        origin_ns: Where the trace begins, ns on rank 0's clock.
        dependencies_known: See `SavingsFinder`.
        most_parts: Parts of the critical paths that are returned; None for all.
        most_periods: Periods into which the course of tensors is divided.
        continues: Whether the steps before these are measured as well, in another range.
        at_end: Whether these are the last steps of the trace.
    """

    selected: bool
    origin_ns: int
    dependencies_known: bool
    most_parts: int | None = MOST_PARTS
    most_periods: int = MAX_PERIODS
    continues: bool = False
    at_end: bool = True


@dataclass(frozen=True)
class StepMeasures:
    """Measures of steps, and the intermediate results that are kept for further computations.

    Attributes:
        measured: The measures.
        paths: Step -> its critical path.
        executions: Every run of a kernel, a copy or an operator.
    """

    measured: Measured
    paths: dict[int, Path]
    executions: Executions


def measure_steps(
    trace: Trace,
    scans: Mapping[int, RankScan],
    joined: Joined,
    steps: Steps,
    request: Request,
) -> StepMeasures:
    """Measures steps.

    Args:
        trace: The trace.
        scans: Rank -> its scan.
        joined: All messages.
        steps: The steps; without any, the whole trace is measured.
        request: What is measured.
    """
    selected = request.selected
    measured = measure_ranks(
        trace, scans, joined, steps, selected=selected, continues=request.continues
    )
    rank_steps = measured.steps
    hangs = find_hangs(trace, scans, joined, request.origin_ns)
    failure = find_failure(trace, hangs, request.origin_ns) if request.at_end else None
    if failure is not None:
        hangs = tuple(hang for hang in hangs if has_lasted(hang))
    steady = steps.number[steps.steady]
    collectives, messages = joined.collectives, joined.messages
    if selected:
        chosen = in_steps(collectives.step, steps.number)
        chosen_messages = in_steps(messages.step, steps.number)
    else:
        chosen, chosen_messages = np.ones(len(collectives), bool), np.ones(len(messages), bool)
    steady_collectives = in_steps(collectives.step, steady) if len(steps) else chosen
    links = link_times(joined, chosen_messages)
    with ThreadPoolExecutor(1) as beside:
        tensors = beside.submit(tensor_times, trace, scans, steady, request.most_periods)
        if isinstance(trace.engine, EmbeddedEngine) and _events_of(scans) > _MOST_BESIDE:
            tensors.result()
        paths = find_paths(trace, scans, joined, steps)
    lateness = find_lateness(joined, steady_collectives)
    steady_paths = [paths[number] for number in steady.tolist()]
    causes = _find_causes(scans, joined, steps, lateness, steady_paths, request=request)
    executions = find_executions(trace, steps.number if selected else None)
    counted = len(rank_steps["step"]) if len(steps) else 0
    messages_of, bytes_of = messages_in_steps(steps.number, joined)
    update_names = [part.name for part in causes.parts if part.category == "update"]
    found = Measured(
        steps=steps,
        messages_in_steps=messages_of,
        bytes_in_steps=bytes_of,
        rank_steps=rank_steps,
        ranks=measured.ranks,
        idle=measured.idle,
        waited_for=measured.waited_for,
        rows=step_rows(steps, rank_steps, paths, request.origin_ns),
        path_sums=lambda step: path_sums(paths[step]),
        collectives=collective_times(joined, chosen),
        links=links,
        fit_samples=(
            collective_samples(trace, scans, joined, chosen)
            | link_samples(trace, scans, joined, chosen_messages)
        ),
        sizes=size_bins(joined, chosen_messages),
        traffic=traffic_rows(joined, links, chosen),
        joining=joining(joined, chosen, chosen_messages),
        hangs=hangs,
        mismatches=find_mismatches(trace, joined, hangs),
        failure=failure,
        standstill=find_standstill(trace, scans) if request.at_end and not hangs else None,
        kernels=kernel_rows(executions, counted),
        operators=operator_rows(executions, counted),
        queues=device_queues(trace, steps.number if selected else None),
        facts={rank: _facts(scan) for rank, scan in scans.items()},
        at_end=request.at_end,
        steady=SteadyMeasures(
            lateness=lateness,
            straggler_saves=causes.straggler_saves,
            tensors=tensors.result(),
            parts=causes.parts,
            path_ranks=causes.path_ranks,
            savings=causes.savings,
            pipelines=causes.pipelines,
            waiting=causes.waiting,
            root_causes=causes.root_causes,
            facts=job_facts(trace, scans, joined, steady, tuple(filter(None, update_names))),
            dimensions=dimension_times(trace, scans, joined, steps),
        ),
    )
    return StepMeasures(found, paths, executions)


def _facts(scan: RankScan) -> RankFacts:
    unrecorded = int(length(scan.activity.unrecorded))
    span = scan.last - scan.first
    return RankFacts(scan.events, scan.damaged, scan.backwards, unrecorded, span)


class _Causes(NamedTuple):
    """Results of the dependencies between ranks."""

    straggler_saves: dict[int, float]
    parts: tuple[PathPart, ...]
    path_ranks: tuple[PathRank, ...]
    savings: Savings | None
    pipelines: tuple[Pipeline, ...]
    waiting: Waiting
    root_causes: tuple[RootCause, ...]


def _find_causes(
    scans: Mapping[int, RankScan],
    joined: Joined,
    steps: Steps,
    lateness: Lateness,
    paths: Sequence[Path],
    *,
    request: Request,
) -> _Causes:
    """Attributes waiting to its causes, and replays the steady steps without them.

    Args:
        scans: Rank -> its scan.
        joined: All messages.
        steps: All steps.
        lateness: Shows the worst stragglers, whose savings are found.
        paths: The critical paths of the steady steps.
        request: What is measured.
    """
    dependencies_known = request.dependencies_known
    graph = find_graph(scans, joined, tolerance_ns=_CLOCK_ERROR_NS if dependencies_known else 0)
    work = {rank: own_work(scan) for rank, scan in scans.items()}
    delayed = RootCauseFinder(scans, joined, graph, steps, work)
    parts, path_ranks = path_parts(paths, request.most_parts)
    if not paths:
        return _Causes({}, parts, path_ranks, None, (), delayed.waiting(), delayed.causes(None))
    finder = SavingsFinder(scans, joined, graph, steps, work, dependencies_known=dependencies_known)
    alone = finder.by_part(parts[:MOST_PARTS], paths)
    replayed = (
        replace(part, alone_us=us) for part, us in zip(parts[:MOST_PARTS], alone, strict=True)
    )
    return _Causes(
        straggler_saves=finder.by_rank(lateness.worst(_STRAGGLERS_REPLAYED)),
        parts=(*replayed, *parts[MOST_PARTS:]),
        path_ranks=path_ranks,
        savings=finder.by_category(),
        pipelines=pipelines(scans, joined, graph, steps.number[steps.steady]),
        waiting=delayed.waiting(),
        root_causes=delayed.causes(finder),
    )


def _events_of(scans: Mapping[int, RankScan]) -> int:
    return sum(scan.events for scan in scans.values())


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
