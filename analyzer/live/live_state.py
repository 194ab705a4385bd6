"""The state of a running job at one moment, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.events.interval_sets import EMPTY, Spans
from ddltrace.analyzer.formatting.units import printable
from ddltrace.analyzer.live.live_rank import LiveRank, OpenMessage
from ddltrace.analyzer.measures.last_activity import at_place
from ddltrace.tracer.exit_status import status_text
from ddltrace.tracer.trace.completeness import listed

if TYPE_CHECKING:
    from ddltrace.tracer.launch.rank_ends import End
    from ddltrace.tracer.trace.run_info import RankInfo


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


_SHORTEST_HANG_NS: Final = 1_500_000_000
_TIMES_LONGER: Final = 5
"""A message hangs when it takes this many times longer than the longest one before."""

_LONG_HANG_NS: Final = 3_500_000_000
_LITTLE_LONGER: Final = 1.5
"""After `_LONG_HANG_NS`, this many times longer is enough: a hang is reported within 5 s unless
messages of 2.3 s or more are usual."""

_SILENT_NS: Final = 4_000_000_000
_SILENT_S: Final = 3.5


@dataclass(frozen=True)
class ProcessSigns:
    """Observations of the processes besides their events.

    Attributes:
        ends: Segment -> the end of a process of this host that has ended.
        silent_s: Segment -> seconds since a process last wrote its counters, for processes that
            run elsewhere.
        now_ns: Segment -> the present on the process's clock; without processes whose clock
            cannot be read here.
    """

    ends: Mapping[str, End]
    silent_s: Mapping[str, float]
    now_ns: Mapping[str, int]


def find_alerts(
    ranks: Sequence[LiveRank], signs: ProcessSigns, *, running: bool
) -> tuple[Alert, ...]:
    """All alerts, the most likely cause first.

    Args:
        ranks: The newest process of each rank.
        signs: See `ProcessSigns`.
        running: Whether the job still runs.
    """
    dead = find_dead([rank.info for rank in ranks], signs)
    if dead or not running:
        # Ranks that wait for a dead one do not hang by themselves.
        return dead
    recording = [rank for rank in ranks if not rank.info.is_off]
    hang = _find_hang(recording, signs)
    return (hang,) if hang is not None else _find_standstill(recording, signs)


def find_dead(infos: Sequence[RankInfo], signs: ProcessSigns) -> tuple[Alert, ...]:
    """The ranks whose processes have ended without success, in the order of their ends."""
    failed = [info for info in infos if _has_failed(info, signs.ends.get(info.segment))]

    def ended_ns(info: RankInfo) -> float:
        end = signs.ends.get(info.segment)
        known = info.ended_ns if end is None else end.ended_ns
        return float("inf") if known is None else known

    failed.sort(key=ended_ns)
    alerts = []
    for place, info in enumerate(failed):
        end = signs.ends.get(info.segment)
        status = info.exit_status if end is None else end.exit_status
        how = "" if status is None else f": {status_text(status)}"
        first = " first" if place == 0 and len(failed) > 1 and ended_ns(info) < float("inf") else ""
        where = printable(info.host)
        alerts.append(
            Alert(
                "dead",
                (info.rank,),
                f"Rank {info.rank} (process {info.pid} on {where}) has died{first}{how}.",
            )
        )
    for info in infos:
        silent_s = signs.silent_s.get(info.segment, 0.0)
        if info.status == "running" and silent_s > _SILENT_S:
            alerts.append(
                Alert(
                    "dead",
                    (info.rank,),
                    f"Rank {info.rank} has written nothing for {silent_s:.1f} s: its process or "
                    f"its host {printable(info.host)} is dead, or the file system is slow.",
                )
            )
    return tuple(alerts)


def _has_failed(info: RankInfo, end: End | None) -> bool:
    status = info.exit_status if end is None else end.exit_status
    if status is not None:
        return status != 0
    return info.status == "killed" or (end is not None and info.status == "running")


def _find_hang(ranks: Sequence[LiveRank], signs: ProcessSigns) -> Alert | None:
    """The message that has hung for longest, and the ranks that do not take part in it."""
    longest_ns = max((rank.longest_ns for rank in ranks), default=0)
    patience_ns = min(
        max(_SHORTEST_HANG_NS, _TIMES_LONGER * longest_ns),
        max(_LONG_HANG_NS, round(_LITTLE_LONGER * longest_ns)),
    )
    hung: list[tuple[int, LiveRank, OpenMessage]] = []
    for rank in ranks:
        now_ns = signs.now_ns.get(rank.info.segment)
        if now_ns is None:
            continue
        for message in rank.open.values():
            waited_ns = now_ns - message.start_ns
            if waited_ns >= patience_ns:
                hung.append((waited_ns, rank, message))
    if not hung:
        return None
    by_rank = {rank.info.rank: rank for rank in ranks}
    # A rank that waits for one message may be missing in another one: the cause is a message
    # whose missing ranks wait for nothing.
    stuck = {rank.info.rank for _, rank, _ in hung}
    found = [
        (_missing(rank, message, by_rank), wait, rank, message) for wait, rank, message in hung
    ]
    found.sort(key=lambda hang: (not set(hang[0]) - stuck, -hang[1]))
    missing, waited_ns, rank, message = found[0]
    waiting = sorted(
        other.info.rank
        for _, other, its in hung
        if (its.op, its.group, its.seq) == (message.op, message.group, message.seq)
    )
    number = "" if message.seq is None else f" number {message.seq}"
    what = f"{printable(message.op)}{number} of group {printable(message.group)}"
    step = "" if message.step is None else f" in step {message.step}"
    since = f"{waited_ns / 1e9:.1f} s"
    if not missing:
        text = f"{what} has been in flight on all ranks for {since}{step}."
        return Alert("hang", tuple(waiting), text)
    verb = "has" if len(missing) == 1 else "have"
    doing = "".join(f" Rank {other}{_place(by_rank.get(other))}." for other in missing[:4])
    text = (
        f"Rank {listed(missing)} {verb} not joined {what}, in which rank {listed(waiting)} "
        f"has waited for {since}{step}.{doing}"
    )
    return Alert("hang", tuple(missing), text)


def _missing(rank: LiveRank, message: OpenMessage, by_rank: Mapping[int, LiveRank]) -> list[int]:
    """The ranks that have not entered a message."""
    if message.peer is not None:
        return [message.peer]
    if message.seq is None:
        return []
    group = next((g for g in rank.info.groups if g.name == message.group), None)
    members = sorted(by_rank) if group is None else sorted(group.ranks)
    return [
        member
        for member in members
        if member not in by_rank or by_rank[member].entered.get(message.group, -1) < message.seq
    ]


def _find_standstill(ranks: Sequence[LiveRank], signs: ProcessSigns) -> tuple[Alert, ...]:
    """An alert if every rank is silent and none waits for a message."""
    silent_ns = []
    for rank in ranks:
        now_ns = signs.now_ns.get(rank.info.segment)
        silence = rank.info.silence
        if now_ns is None or silence is None or rank.last_ns is None:
            return ()
        if silence["noticed_ns"] < rank.last_ns or now_ns - rank.last_ns < _SILENT_NS:
            return ()
        silent_ns.append(now_ns - rank.last_ns)
    if not silent_ns:
        return ()
    doing = " ".join(f"Rank {rank.info.rank}{_place(rank)}." for rank in ranks[:4])
    text = f"No rank has recorded anything for {min(silent_ns) / 1e9:.1f} s. {doing}"
    return (Alert("silent", tuple(rank.info.rank for rank in ranks), text),)


def _place(rank: LiveRank | None) -> str:
    """Where a rank is, as the end of a sentence; what is known of it."""
    if rank is None:
        return " has recorded nothing"
    silence = rank.info.silence
    if silence is not None and silence["stack"] and silence["noticed_ns"] >= (rank.last_ns or 0):
        return f" {printable(at_place(silence))}"
    last = max(rank.steps, default=None)
    return " has completed no step" if last is None else f" completed step {last} last"
