"""The measures of some steps of a trace: all of them, or one range of a long trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddltrace.analyzer.events.event_columns import FloatArray, IntArray
from ddltrace.analyzer.measures.bandwidth import FitKind, FitSamples, SizeBin
from ddltrace.analyzer.measures.collectives import (
    CollectiveKind,
    CollectiveTimes,
    Joining,
    LinkTimes,
)
from ddltrace.analyzer.measures.device_queues import DeviceQueues
from ddltrace.analyzer.measures.dimensions import DimensionTimes
from ddltrace.analyzer.measures.failures import Failure
from ddltrace.analyzer.measures.hangs import Hang, Standstill
from ddltrace.analyzer.measures.idle import IdleRow, WaitedFor
from ddltrace.analyzer.measures.job_facts import JobFacts
from ddltrace.analyzer.measures.mismatches import Mismatch
from ddltrace.analyzer.measures.operation_rows import KernelRow, OperatorRow
from ddltrace.analyzer.measures.path_parts import PathPart, PathRank
from ddltrace.analyzer.measures.pipelines import Pipeline
from ddltrace.analyzer.measures.rank_measures import RankRow
from ddltrace.analyzer.measures.root_causes import RootCause, Waiting
from ddltrace.analyzer.measures.savings import Savings
from ddltrace.analyzer.measures.slow_steps import PathSums
from ddltrace.analyzer.measures.step_rows import StepRow
from ddltrace.analyzer.measures.steps import Steps
from ddltrace.analyzer.measures.stragglers import Lateness
from ddltrace.analyzer.measures.tensors import TensorTimes
from ddltrace.analyzer.measures.trace_facts import RankFacts
from ddltrace.analyzer.measures.traffic import TrafficRow


@dataclass(frozen=True)
class SteadyMeasures:
    """Measures of the steady steps among those measured.

    Attributes:
        lateness: How late ranks are at collectives.
        straggler_saves: Rank -> possible savings per step if no rank waited for it, for the worst.
        tensors: Times of parameters.
        parts: Parts of the critical paths.
        path_ranks: These paths by category and rank.
        savings: Possible savings by category; None without steps.
        pipelines: Pipelines with their bubbles.
        waiting: How long ranks wait for each other.
        root_causes: Root causes of this waiting.
        facts: Properties of the job.
        dimensions: Communication by parallel dimension; without steps, of the whole trace.
    """

    lateness: Lateness
    straggler_saves: dict[int, float]
    tensors: TensorTimes
    parts: tuple[PathPart, ...]
    path_ranks: tuple[PathRank, ...]
    savings: Savings | None
    pipelines: tuple[Pipeline, ...]
    waiting: Waiting
    root_causes: tuple[RootCause, ...]
    facts: JobFacts
    dimensions: dict[str, DimensionTimes]


@dataclass(frozen=True)
class Measured:
    """Measures of some steps.

    Attributes:
        steps: The steps.
        messages_in_steps: Messages of all ranks in each step.
        bytes_in_steps: Their bytes.
        rank_steps: Measures of every rank in each step, see `Analysis.rank_steps`.
        ranks: A row for each rank.
        idle: Idle time of each rank by cause.
        waited_for: Rank -> the ranks for which it waits.
        rows: A row for each step.
        path_sums: Gives the sums of the critical path of a step.
        collectives: Measured collectives by operation, group and size.
        links: Measured sends and receives by sending and receiving rank.
        fit_samples: Sizes and transfers from which costs are fitted.
        sizes: Messages by size.
        traffic: Bytes by pair of ranks.
        joining: How well messages were found on all their ranks.
        hangs: Messages that never completed, causes first.
        mismatches: Completed messages on which ranks disagree.
        failure: The rank that ended first in a job that failed.
        standstill: The positions of all ranks if none records events any more.
        kernels: Kernels and copies by name.
        operators: Operators and runtime calls by name.
        queues: Launches, streams and copies of devices.
        facts: Rank -> facts about its record.
        at_end: Whether the last steps of the trace are among these.
        steady: Measures of the steady steps.
    """

    steps: Steps
    messages_in_steps: IntArray
    bytes_in_steps: IntArray
    rank_steps: dict[str, FloatArray]
    ranks: tuple[RankRow, ...]
    idle: tuple[IdleRow, ...]
    waited_for: dict[int, WaitedFor]
    rows: tuple[StepRow, ...]
    path_sums: Callable[[int], PathSums]
    collectives: dict[CollectiveKind, CollectiveTimes]
    links: dict[tuple[int, int], LinkTimes]
    fit_samples: dict[FitKind, FitSamples]
    sizes: tuple[SizeBin, ...]
    traffic: tuple[TrafficRow, ...]
    joining: Joining
    hangs: tuple[Hang, ...]
    mismatches: tuple[Mismatch, ...]
    failure: Failure | None
    standstill: Standstill | None
    kernels: tuple[KernelRow, ...]
    operators: tuple[OperatorRow, ...]
    queues: DeviceQueues
    facts: dict[int, RankFacts]
    at_end: bool
    steady: SteadyMeasures
