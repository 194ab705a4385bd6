"""What was recorded, and how clocks were aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.interval_sets import length
from ddltrace.analyzer.formatting.units import share_text
from ddltrace.analyzer.importers.straggler_analysis.operations import WORKERS_LABEL
from ddltrace.analyzer.measures.distribution import merged_records
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, derived, merged_by
from ddltrace.analyzer.trace.align import SHARED
from ddltrace.tracer.capture.overhead_probe import cost_text
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.communication_kernels import SUSPECTS_LABEL


@dataclass(frozen=True)
class RankClockFacts:
    """The offset of a rank's clock from rank 0's clock.

    Attributes:
        rank: Global rank.
        offset_us: Offset that is added to the rank's times, at its first event.
        drift_ppm: Change of the offset, microseconds per second of the rank's clock.
        residual_us: Bound on the remaining error; None if it is unknown.
        method: How the offset was found: ``shared clock``, ``exchanges with rank 0``,
            ``exchanges with rank 0 and messages``, ``messages``, ``wall clocks`` or ``none``.
    """

    rank: int
    offset_us: float
    drift_ppm: float
    residual_us: float | None
    method: str


@dataclass(frozen=True)
class ClockFacts:
    """How clocks were aligned. Differences across ranks below `max_residual_us` are unsure.

    Attributes:
        method: The ranks' methods as in `RankClockFacts.method`, except for shared clocks.
        max_residual_us: The largest residual of all ranks; None if the residual of one rank is
            unknown.
        ranks: By rank.
    """

    method: str
    max_residual_us: float | None
    ranks: tuple[RankClockFacts, ...]


def _clock_facts(whole: Whole) -> ClockFacts:
    """How the clocks of a trace were aligned."""
    trace, residual = whole.trace, whole.residual_ns
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


CLOCK: Final = derived("clock", _clock_facts)


_UNRECORDED_WORTH_SAYING: Final = 0.01


@dataclass(frozen=True)
class TraceFacts:
    """What was recorded.

    Attributes:
        name: The trace's name.
        world_size: Number of ranks of the job.
        ranks: Ranks with events in the trace.
        hosts: Names of their hosts.
        steps: Completed steps that were analyzed.
        source: ``ddltrace``, or the imported format.
        status: ``complete``, ``partial`` or ``running``.
        exit_status: Exit status of the job; 128 + n if signal n killed it; null if it is not known.
        level: Level of detail of the trace.
        command: The job's command line.
        events: Events analyzed.
        dropped: Events that did not fit in the tracer's buffer.
        lost_bytes: Bytes of event files that could not be read.
        notes: Limitations of the trace that a reader must know.
        suspected_communication: Kernels that count as computation although they are named like
            communication, and how often they ran, at most 20.
    """

    name: str
    world_size: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: int
    source: str
    status: str
    exit_status: int | None
    level: str
    command: tuple[str, ...]
    events: int
    dropped: int
    lost_bytes: int
    notes: tuple[str, ...]
    suspected_communication: dict[str, int] = field(default_factory=dict)


class RankFacts(NamedTuple):
    """Facts about the record of one rank.

    Attributes:
        events: Number of events.
        damaged: Events whose times cannot be real.
        backwards: Events that end before they start.
        unrecorded_ns: Time of which nothing is recorded.
        span_ns: From the first to the last event.
        is_partial: Whether `damaged` and `backwards` are those of the range that has most.
    """

    events: int
    damaged: int
    backwards: int
    unrecorded_ns: int
    span_ns: int
    is_partial: bool = False


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


def _trace_facts(whole: Whole) -> TraceFacts:
    """Collects what was recorded, and the limitations that a reader must know."""
    trace, selection, steps = whole.trace, whole.selection, whole.steps
    facts, run = whole.found.of(TRACE), trace.run
    notes = list(trace.notes)
    if selection is not None and selection.note is not None:
        notes.append(selection.note)
    for rank, of_rank in facts.items():
        least = "at least " if of_rank.is_partial else ""
        if of_rank.damaged:
            count = f"{least}{counted(of_rank.damaged, 'event')}"
            notes.append(f"rank {rank}: {count} left out: impossible times")
        if of_rank.backwards:
            count = f"{least}{counted(of_rank.backwards, 'event', 'ends')}"
            notes.append(f"rank {rank}: {count} before the start: taken as instants")
    costs = [info.cost for info in run.ranks if info.cost]
    if costs:
        notes.append(
            f"{costs[0]['steps']} steps were left unrecorded, to measure what recording costs: "
            f"{cost_text(costs)}"
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


def _both_facts(ranges: Sequence[RankFacts]) -> RankFacts:
    """Facts about a rank's record over ranges, which have neighbouring steps in common."""
    return RankFacts(
        events=sum(each.events for each in ranges),
        damaged=max(each.damaged for each in ranges),
        backwards=max(each.backwards for each in ranges),
        unrecorded_ns=sum(each.unrecorded_ns for each in ranges),
        span_ns=sum(each.span_ns for each in ranges),
        is_partial=True,
    )


def _facts(joined: JoinedSteps) -> dict[int, RankFacts]:
    """Rank -> facts about its record."""
    return {
        rank: RankFacts(
            scan.events,
            scan.damaged,
            scan.backwards,
            int(length(scan.activity.unrecorded)),
            scan.last - scan.first,
        )
        for rank, scan in joined.scans.items()
    }


def _both(former: dict[int, RankFacts], later: dict[int, RankFacts]) -> dict[int, RankFacts]:
    return merged_records(former, later, _both_facts)


TRACE: Final = Measure("trace", _trace_facts, _facts, merged_by(_both), of="all")
