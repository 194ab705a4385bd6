"""The state of a running job at one moment: what the live page shows."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.analyzer.events.interval_sets import EMPTY, Spans


@dataclass(frozen=True)
class Alert:
    """Something that is wrong with the job.

    Attributes:
        kind: ``dead``, ``hang`` or ``silent``.
        ranks: The ranks that are named as the cause.
        text: One sentence.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class LiveRow:
    """One rank within the window.

    Attributes:
        rank: Its number.
        step: Its last completed step; None before the first.
        step_us: Median duration of its steps in the window; None without steps.
        overlap_ratio: Share of its communication that its compute hides; None without either.
        late_share: Share of the collectives to which it came last; None without collectives.
        lateness_us: Median of its arrival minus the median arrival of the other ranks, over those
            collectives.
        cpu_cores: Processor time of the process per second; None if not recorded.
        memory_bytes: Resident memory of the process; None if not recorded.
        silent_s: Time since its last event; None if unknown.
    """

    rank: int
    step: int | None = None
    step_us: float | None = None
    overlap_ratio: float | None = None
    late_share: float | None = None
    lateness_us: float | None = None
    cpu_cores: float | None = None
    memory_bytes: float | None = None
    silent_s: float | None = None


@dataclass(frozen=True)
class LiveLane:
    """The last steps of one rank, in ns since `LiveState.origin_ns`."""

    rank: int
    compute: Spans = EMPTY
    communication: Spans = EMPTY
    waiting: Spans = EMPTY


@dataclass(frozen=True)
class LiveState:
    """A running job.

    Attributes:
        status: ``running``, ``complete`` or ``partial``, as in ``run.json``.
        exit_status: The job's exit status; None while it runs, or if it is unknown.
        world_size: Number of ranks of the job; 0 before the first rank has started.
        num_steps: Steps that all ranks have completed.
        rows: One per rank.
        steps: Numbers of the last steps that all ranks completed.
        step_us: Wall time of each of them: from the earliest start to the latest end.
        alerts: What is wrong, the most likely cause first.
        lanes: The last steps as a timeline.
        lane_steps: The steps that `lanes` shows; None without any.
        off: Ranks whose recording is switched off.
        notes: Parts of the trace that cannot be read.
    """

    status: str = "running"
    exit_status: int | None = None
    world_size: int = 0
    num_steps: int = 0
    rows: tuple[LiveRow, ...] = ()
    steps: tuple[int, ...] = ()
    step_us: tuple[float, ...] = ()
    alerts: tuple[Alert, ...] = ()
    lanes: tuple[LiveLane, ...] = ()
    lane_steps: tuple[int, int] | None = None
    off: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
