"""An analysis: the records of all measures, which mirror the JSON of ``ddltrace analyze --json``.

Times are microseconds (``_us``), shares are fractions from 0 to 1, bandwidths are gigabits per
second (``_gbps``). Values that the trace does not contain are None, never zero.

``docs/report-reference.md`` defines the times that the records name (compute, communication,
overlap, exposed, waiting, transfer, idle, ...) in words and in columns of a trace; its text is in
``docs/generate_report_reference.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.joined.executions import Executions
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.bandwidth import CostFit, SizeBin
from ddltrace.analyzer.measures.clock_facts import ClockFacts
from ddltrace.analyzer.measures.collectives import CollectiveRow, Joining, P2PRow
from ddltrace.analyzer.measures.device_queues import CopyRow, DeviceStepRow, LaunchRow, StreamRow
from ddltrace.analyzer.measures.dimensions import DimensionRow
from ddltrace.analyzer.measures.failures import Failure
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.hangs import Hang, Standstill
from ddltrace.analyzer.measures.ideal_job import IdealJob
from ddltrace.analyzer.measures.idle import IdleRow
from ddltrace.analyzer.measures.launch_gaps import LaunchGaps
from ddltrace.analyzer.measures.mismatches import Mismatch
from ddltrace.analyzer.measures.nccl import Nccl
from ddltrace.analyzer.measures.operation_rows import KernelRow, OperatorRow
from ddltrace.analyzer.measures.path_parts import PathPart, PathRank
from ddltrace.analyzer.measures.pipelines import Pipeline
from ddltrace.analyzer.measures.rank_measures import RankRow
from ddltrace.analyzer.measures.resources import ResourceRow
from ddltrace.analyzer.measures.root_causes import RootCause, Waiting
from ddltrace.analyzer.measures.savings import Savings
from ddltrace.analyzer.measures.slow_steps import SlowSteps
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.measures.stragglers import StragglerRow
from ddltrace.analyzer.measures.summary import Summary
from ddltrace.analyzer.measures.tensors import TensorRow
from ddltrace.analyzer.measures.trace_facts import TraceFacts
from ddltrace.analyzer.measures.traffic import TrafficRow
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
        rank_steps: Column name -> array over (rank, step), times in nanoseconds.
        tensor_course: Parameter -> its exposed communication, microseconds per rank and step,
            in each of at most 64 periods of the run.
    """

    trace: TraceFacts
    clock: ClockFacts
    summary: Summary
    joining: Joining
    ranks: tuple[RankRow, ...]
    steps: tuple[StepRow, ...]
    collectives: tuple[CollectiveRow, ...]
    stragglers: tuple[StragglerRow, ...]
    tensors: tuple[TensorRow, ...]
    p2p: tuple[P2PRow, ...]
    cost_fits: tuple[CostFit, ...]
    message_sizes: tuple[SizeBin, ...]
    traffic: tuple[TrafficRow, ...]
    dimensions: tuple[DimensionRow, ...]
    critical_path: tuple[PathPart, ...]
    critical_path_by_rank: tuple[PathRank, ...]
    savings: Savings | None
    pipelines: tuple[Pipeline, ...]
    waiting: Waiting
    root_causes: tuple[RootCause, ...]
    hangs: tuple[Hang, ...]
    mismatches: tuple[Mismatch, ...]
    failure: Failure | None
    standstill: Standstill | None
    findings: tuple[Finding, ...]
    slow_steps: SlowSteps
    idle: tuple[IdleRow, ...]
    kernels: tuple[KernelRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    launches: tuple[LaunchRow, ...] = ()
    launch_gaps: LaunchGaps | None = None
    device_steps: tuple[DeviceStepRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    resources: tuple[ResourceRow, ...] = ()
    nccl: Nccl | None = None
    ideal_job: IdealJob | None = None
    rank_steps: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    tensor_course: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

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


PREFIXES: Final = {"critical_path": "path", "copies": "copy"}
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
