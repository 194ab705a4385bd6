"""An analysis: the records of all measures, which mirror the JSON of ``ddltrace analyze --json``.

Times are microseconds (``_us``), shares are fractions from 0 to 1, bandwidths are gigabits per
second (``_gbps``). Values that the trace does not contain are None, never zero.

``docs/report-reference.md`` defines the times that the records name (compute, communication,
overlap, exposed, waiting, transfer, idle, ...) in words and in columns of a trace; its text is in
``docs/generate_report_reference.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.engine.engine import EmbeddedEngine
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.joined.executions import Executions
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.all_to_all import ALL_TO_ALL, AllToAllRow
from ddltrace.analyzer.measures.bandwidth import COST_FITS, MESSAGE_SIZES, CostFit, SizeBin
from ddltrace.analyzer.measures.collectives import (
    COLLECTIVES,
    JOINING,
    P2P,
    CollectiveRow,
    Joining,
    P2PRow,
)
from ddltrace.analyzer.measures.connections import CONNECTIONS, ConnectionRow
from ddltrace.analyzer.measures.device_queues import (
    COPIES,
    DEVICE_QUEUES,
    DEVICE_STEPS,
    LAUNCH_GAPS,
    STREAMS,
    CopyRow,
    DeviceStepRow,
    LaunchGaps,
    LaunchRow,
    StreamRow,
)
from ddltrace.analyzer.measures.dimensions import DIMENSIONS, DimensionRow
from ddltrace.analyzer.measures.failures import FAILURE, HANGS, MISMATCHES, STANDSTILL, Failure
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.goodput import GOODPUT, Goodput
from ddltrace.analyzer.measures.hangs import Hang, Mismatch, Standstill
from ddltrace.analyzer.measures.ideal_job import IDEAL_JOB, IdealJob
from ddltrace.analyzer.measures.idle import IdleRow
from ddltrace.analyzer.measures.job_facts import FINDINGS
from ddltrace.analyzer.measures.measure import Found, JoinedSteps, Measure, measured
from ddltrace.analyzer.measures.nccl import NCCL, Nccl
from ddltrace.analyzer.measures.operation_rows import KERNELS, OPERATORS, KernelRow, OperatorRow
from ddltrace.analyzer.measures.path_parts import PathPart, PathRank
from ddltrace.analyzer.measures.pipelines import PIPELINES, Pipeline
from ddltrace.analyzer.measures.rank_measures import IDLE, RANK_STEPS, RANKS, RankRow
from ddltrace.analyzer.measures.resources import RESOURCES, ResourceRow
from ddltrace.analyzer.measures.roles import ROLES, RoleRow
from ddltrace.analyzer.measures.root_causes import ROOT_CAUSES, WAITING, RootCause, Waiting
from ddltrace.analyzer.measures.savings import (
    CRITICAL_PATH,
    CRITICAL_PATH_BY_RANK,
    SAVINGS,
    Savings,
)
from ddltrace.analyzer.measures.slow_steps import SLOW_STEPS, SlowSteps
from ddltrace.analyzer.measures.step_rows import STEPS, StepRow
from ddltrace.analyzer.measures.steps import messages_in_steps
from ddltrace.analyzer.measures.stragglers import STRAGGLERS, StragglerRow
from ddltrace.analyzer.measures.summary import SUMMARY, Summary
from ddltrace.analyzer.measures.tensors import TENSOR_COURSE, TENSORS, TensorRow, find_tensors
from ddltrace.analyzer.measures.trace_facts import CLOCK, TRACE, ClockFacts, TraceFacts
from ddltrace.analyzer.measures.traffic import TRAFFIC, TrafficRow
from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = "ddltrace.analysis/1"


@dataclass(frozen=True)
class Analysis:
    """A measured trace.

    If a trace was too long to be analyzed at once, a note in `trace` says so; `docs/scale.md` says
    which values are rounded then.

    Attributes:
        trace: What was recorded.
        clock: How clocks were aligned.
        summary: The steady steps over all ranks.
        joining: How well messages were found on all their ranks.
        ranks: One row per rank.
        steps: One row per step.
        collectives: One row per operation, group and size.
        stragglers: One row per rank that is ever the last to arrive, the worst first.
        tensors: One row per parameter, the most exposed first.
        p2p: One row per pair of ranks that send and receive.
        cost_fits: Latency and bandwidth by operation.
        message_sizes: Messages by operation and power of two of their size.
        traffic: Bytes by pair of ranks.
        all_to_all: How evenly the all-to-alls of each group load its ranks.
        connections: TCP connections between ranks of different hosts; empty without recorded
            counters.
        roles: The roles of the ranks, in a job of several roles.
        dimensions: Communication by parallel dimension, the longest exposed time first.
        critical_path: The largest parts of the critical paths of the steady steps.
        critical_path_by_rank: All of these paths by category and rank; they sum to the mean step.
        savings: Possible savings per step by category; null without steps.
        pipelines: Pipelines of stages that pass microbatches on, with their bubbles.
        waiting: How long ranks wait for each other.
        root_causes: Root causes of this waiting, most expensive first. Their direct and propagated
            waiting sum to all waiting.
        hangs: Collectives that never completed, causes first.
        mismatches: Completed messages on whose operation, element type or size ranks disagree, the
            first 20; only sizes and operations unless it is a dump of the Flight Recorder.
        failure: The rank that ended first in a job that failed; null if it is not known.
        standstill: The positions of all ranks if all have stopped recording events; null if some
            continue, if the job ended, or if collectives hang.
        findings: Possible improvements, the largest savings first; before them, hosts without a
            free processor, which make the other numbers unsure.
        slow_steps: Steady steps that took much longer than the others.
        idle: Idle time of each rank by cause.
        kernels: Kernels and copies by name, the longest total first; empty unless the trace has
            single operators (level ``op``, imported profiles).
        operators: Operators and runtime calls by name, the longest self time first.
        launches: How each rank's host launched its device work.
        launch_gaps: Launches in the steady steps, and the time in which devices idle between them;
            null without recorded launches.
        device_steps: Steps of each rank on its device's time.
        streams: Each stream's idle time by cause, and its queue.
        copies: Bandwidth of copies by rank and direction.
        resources: Processor, memory and device use of each rank; empty without recorded counters.
        nccl: What NCCL's profiler plugin recorded; null without its events.
        ideal_job: The slowdown by stragglers; null unless the trace is StragglerAnalysis's.
        goodput: What the job's time went to, over all its attempts; null without steps, and if only
            some steps are analyzed.
        rank_steps: Column name -> array over (rank, step), times in nanoseconds.
        tensor_course: Parameter -> its exposed communication, microseconds per rank and step,
            in each of at most 64 periods of the run.
    """

    trace: TraceFacts = measured(TRACE)
    clock: ClockFacts = measured(CLOCK)
    summary: Summary = measured(SUMMARY)
    joining: Joining = measured(JOINING)
    ranks: tuple[RankRow, ...] = measured(RANKS)
    steps: tuple[StepRow, ...] = measured(STEPS)
    collectives: tuple[CollectiveRow, ...] = measured(COLLECTIVES)
    stragglers: tuple[StragglerRow, ...] = measured(STRAGGLERS)
    tensors: tuple[TensorRow, ...] = measured(TENSORS)
    p2p: tuple[P2PRow, ...] = measured(P2P)
    cost_fits: tuple[CostFit, ...] = measured(COST_FITS)
    message_sizes: tuple[SizeBin, ...] = measured(MESSAGE_SIZES)
    traffic: tuple[TrafficRow, ...] = measured(TRAFFIC)
    all_to_all: tuple[AllToAllRow, ...] = measured(ALL_TO_ALL)
    connections: tuple[ConnectionRow, ...] = measured(CONNECTIONS)
    roles: tuple[RoleRow, ...] = measured(ROLES)
    dimensions: tuple[DimensionRow, ...] = measured(DIMENSIONS)
    critical_path: tuple[PathPart, ...] = measured(CRITICAL_PATH)
    critical_path_by_rank: tuple[PathRank, ...] = measured(CRITICAL_PATH_BY_RANK)
    savings: Savings | None = measured(SAVINGS)
    pipelines: tuple[Pipeline, ...] = measured(PIPELINES)
    waiting: Waiting = measured(WAITING)
    root_causes: tuple[RootCause, ...] = measured(ROOT_CAUSES)
    hangs: tuple[Hang, ...] = measured(HANGS)
    mismatches: tuple[Mismatch, ...] = measured(MISMATCHES)
    failure: Failure | None = measured(FAILURE)
    standstill: Standstill | None = measured(STANDSTILL)
    findings: tuple[Finding, ...] = measured(FINDINGS)
    slow_steps: SlowSteps = measured(SLOW_STEPS)
    idle: tuple[IdleRow, ...] = measured(IDLE)
    kernels: tuple[KernelRow, ...] = measured(KERNELS)
    operators: tuple[OperatorRow, ...] = measured(OPERATORS)
    launches: tuple[LaunchRow, ...] = measured(DEVICE_QUEUES)
    launch_gaps: LaunchGaps | None = measured(LAUNCH_GAPS)
    device_steps: tuple[DeviceStepRow, ...] = measured(DEVICE_STEPS)
    streams: tuple[StreamRow, ...] = measured(STREAMS)
    copies: tuple[CopyRow, ...] = measured(COPIES)
    resources: tuple[ResourceRow, ...] = measured(RESOURCES)
    nccl: Nccl | None = measured(NCCL)
    ideal_job: IdealJob | None = measured(IDEAL_JOB)
    goodput: Goodput | None = measured(GOODPUT)
    rank_steps: dict[str, Any] = measured(RANK_STEPS, shown=False)
    tensor_course: dict[str, Any] = measured(TENSOR_COURSE, shown=False)

    def to_json(self) -> dict[str, Any]:
        """The object that ``ddltrace analyze --json`` prints."""
        shown = [f.name for f in fields(self) if f.repr]
        return {"schema": SCHEMA} | {name: _plain(getattr(self, name)) for name in shown}

    def compared_dimensions(self) -> tuple[DimensionRow, ...]:
        """The rows of `dimensions` if there is something to compare: for reports.

        A job that is only data-parallel, in one group, has nothing to compare.
        """
        several = len({group for row in self.dimensions for group in row.groups}) > 1
        plain = {"data", "unknown"}
        return self.dimensions if several or {r.dimension for r in self.dimensions} - plain else ()

    def ranks_frame(self) -> pd.DataFrame:
        """One row per rank, columns as in `RankRow`, its copies' as ``copy_*``."""
        return _frame(self.ranks, RankRow)

    def steps_frame(self) -> pd.DataFrame:
        """One row per step, columns as in `StepRow`, the critical path's as ``path_*``."""
        return _frame(self.steps, StepRow)

    def rank_steps_frame(self) -> pd.DataFrame:
        """One row per rank and step: start_us, wall_us, compute_us, comm_us, ..."""
        require_extra("frames", "rank_steps_frame()")
        import pandas as pd

        columns = {}
        for name, values in self.rank_steps.items():
            if name.endswith("_ns"):
                columns[name[:-3] + "_us"] = values / 1e3
            else:
                columns[name] = values
        frame: pd.DataFrame = pd.DataFrame(columns)
        return frame

    def collectives_frame(self) -> pd.DataFrame:
        """One row per operation, group and size, columns as in `CollectiveRow`."""
        return _frame(self.collectives, CollectiveRow)

    def tensors_frame(self) -> pd.DataFrame:
        """One row per parameter, columns as in `TensorRow`."""
        return _frame(self.tensors, TensorRow)

    def stragglers_frame(self) -> pd.DataFrame:
        """One row per rank that is ever last, columns as in `StragglerRow`."""
        return _frame(self.stragglers, StragglerRow)


MEASURES: Final[Mapping[str, Measure[Any, Any]]] = {
    each.name: each.metadata["measure"] for each in fields(Analysis)
}
"""The measures by name, in the order of `Analysis`."""

COMPUTED: Final = tuple(each for each in MEASURES.values() if each.compute is not None)
"""Those that are found in steps."""

_MOST_BESIDE: Final = 4_000_000
"""In a trace with more events, tensors and critical paths are not found at the same time in one
process: both need memory for every event."""


def measure_steps(joined: JoinedSteps) -> Found:
    """What all measures find in steps."""
    with ThreadPoolExecutor(1) as beside:
        tensors = beside.submit(joined.once, find_tensors)
        events = sum(scan.events for scan in joined.scans.values())
        if isinstance(joined.trace.engine, EmbeddedEngine) and events > _MOST_BESIDE:
            tensors.result()
        joined.paths  # noqa: B018 (found beside the tensors)
        tensors.result()
    messages, size = messages_in_steps(joined.steps.number, joined.joined)
    parts = {each.name: each.compute(joined) for each in COMPUTED if each.compute is not None}
    return Found(joined.steps, messages, size, parts)


@dataclass(frozen=True)
class Analyzed:
    """An analysis and its intermediate results, for further computations.

    Attributes:
        analysis: The records.
        joined: Every message, joined across ranks.
        paths: Step -> its critical path, piece by piece.
        executions: Every run of a kernel, a copy or an operator.
    """

    analysis: Analysis
    joined: Joined
    paths: Mapping[int, Path]
    executions: Executions


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if value is None else asdict(value)


PREFIXES: Final = {"critical_path": "path", "copies": "copy", "shares": "share"}
"""Records in rows -> how their columns begin in tables."""


def flat_row(row: Any) -> dict[str, Any]:
    """A record with the records in it spread out: ``critical_path`` as ``path_*``, and so on."""
    flat: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if isinstance(value, dict):
            prefix = PREFIXES.get(name, name)
            flat |= {f"{prefix}_{inner}": part for inner, part in value.items()}
        else:
            flat[name] = value
    return flat


def _frame(rows: Sequence[Any], kind: type) -> pd.DataFrame:
    require_extra("frames", "a data frame of an analysis")
    import pandas as pd

    empty: dict[str, list[Any]] = {f.name: [] for f in fields(kind)}
    frame: pd.DataFrame = pd.DataFrame([flat_row(row) for row in rows] if rows else empty)
    return frame
