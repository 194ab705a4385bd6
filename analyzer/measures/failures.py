"""Finds the rank whose end made a job fail: the first to end, as the launchers observed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from ddltrace.analyzer.measures.hangs import (
    Hang,
    Mismatch,
    Standstill,
    find_hangs,
    find_mismatches,
    find_standstill,
    has_lasted,
)
from ddltrace.analyzer.measures.last_activity import last_activity
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, derived, merged_by
from ddltrace.analyzer.measures.process_ends import ProcessLifetimes
from ddltrace.tracer.exit_status import SIGNALLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddltrace.analyzer.measures.hangs import Hang
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.trace.run_info import RankInfo

_AT_ONCE_NS: Final = 1_000_000_000
"""Ranks that are ended by the same signal within this time were ended from outside."""


@dataclass(frozen=True)
class Failure:
    """The rank that ended first in a job that failed.

    Attributes:
        rank: The rank.
        exit_status: Its exit status; 128 + n if signal n killed it; null if it is not known.
        at_us: Time of its end, from the trace's origin.
        before_us: How long before the next rank; None if no other ended after it.
        silent_us: Time since its last event; None without events. The last events of a killed rank
            are not written.
        doing: Its last activity.
        attempt: The job's attempt; null if the job was not restarted.
    """

    rank: int
    exit_status: int | None
    at_us: float
    before_us: float | None
    silent_us: float | None
    doing: str
    attempt: int | None = None


def find_failure(trace: Trace, hangs: Sequence[Hang], origin_ns: int) -> Failure | None:
    """Finds the rank that ended first in a job that failed.

    Args:
        trace: The job's.
        hangs: Hanging collectives. A rank that gave up waiting may end first, although another rank
            is the cause.
        origin_ns: Where the trace begins.

    Returns:
        The failure of the last attempt that failed; None if no attempt failed, if all its ranks
        were ended together, or if the end of one rank was not observed.
    """
    attempts = sorted({info.attempt for info in trace.run.ranks}, reverse=True)
    for attempt in attempts:
        infos = [info for info in trace.run.ranks if info.attempt == attempt]
        succeeded = attempt == attempts[0] and trace.run.exit_status == 0
        failure = _first_to_fail(trace, infos, hangs, origin_ns, succeeded=succeeded)
        if failure is not None:
            return failure if len(attempts) == 1 else replace(failure, attempt=attempt)
    return None


def _first_to_fail(
    trace: Trace,
    infos: Sequence[RankInfo],
    hangs: Sequence[Hang],
    origin_ns: int,
    *,
    succeeded: bool,
) -> Failure | None:
    """The same among the processes of one attempt, with which the command may have succeeded."""
    ends = [
        (trace.moment(info, info.ended_ns), info) for info in infos if info.ended_ns is not None
    ]
    world_size = max(info.world_size for info in infos)
    if len(ends) < len(infos) or len({info.rank for info in infos}) < world_size:
        return None
    ends.sort(key=lambda end: end[0])
    first_ns, first = next((end for end in ends if end[1].exit_status != 0), (0, None))
    if first is None or (first.exit_status is None and first.status != "killed"):
        return None
    rank, status = first.rank, first.exit_status
    if len(ends) > 1 and all(info.exit_status == status for _, info in ends):
        signalled = status is not None and status > SIGNALLED
        if signalled and ends[-1][0] - first_ns < _AT_ONCE_NS:
            return None
        if succeeded:
            return None  # Ray ends its workers after their work
    if any(rank in hang.entered for hang in hangs if hang.missing and has_lasted(hang)):
        return None
    later = [end_ns for end_ns, info in ends if end_ns > first_ns and info.rank != rank]
    did = last_activity(trace, ProcessLifetimes(trace), rank, first_ns)
    silent_ns = None if did.recorded_ns is None else max(0, first_ns - did.recorded_ns)
    return Failure(
        rank=rank,
        exit_status=status,
        at_us=(first_ns - origin_ns) / 1e3,
        before_us=(later[0] - first_ns) / 1e3 if later else None,
        silent_us=None if silent_ns is None else silent_ns / 1e3,
        doing=did.text,
    )


class _Ends(NamedTuple):
    """What did not end as it should.

    Attributes:
        hangs: Collectives that never completed, causes first.
        mismatches: Completed messages on which ranks disagree.
        failure: The rank that ended first in a job that failed.
        standstill: The positions of all ranks if none records events any more.
    """

    hangs: tuple[Hang, ...]
    mismatches: tuple[Mismatch, ...]
    failure: Failure | None
    standstill: Standstill | None


def _ends(joined: JoinedSteps) -> _Ends:
    trace, scans = joined.trace, joined.scans
    hangs = find_hangs(trace, scans, joined.joined, joined.origin_ns)
    failure = find_failure(trace, hangs, joined.origin_ns) if joined.at_end else None
    if failure is not None:
        hangs = tuple(hang for hang in hangs if has_lasted(hang))
    standstill = find_standstill(trace, scans) if joined.at_end and not hangs else None
    return _Ends(hangs, find_mismatches(trace, joined.joined, hangs), failure, standstill)


def _both(former: _Ends, later: _Ends) -> _Ends:
    """What did not end in two ranges; neighbouring ranges show the same hang."""
    hangs: dict[tuple[object, ...], Hang] = {}
    for hang in (*former.hangs, *later.hangs):
        hangs.setdefault((hang.op, hang.group, hang.seq, hang.entered), hang)
    mismatches: dict[tuple[object, ...], Mismatch] = {}
    for each in (*former.mismatches, *later.mismatches):
        mismatches.setdefault((each.group, each.seq, *each.passed), each)
    return _Ends(
        tuple(hangs.values()),
        tuple(mismatches.values()),
        former.failure or later.failure,
        former.standstill or later.standstill,
    )


def _hangs(whole: Whole) -> tuple[Hang, ...]:
    found = whole.found.of(HANGS)
    every = found.failure is None
    return tuple(hang for hang in found.hangs if every or has_lasted(hang))


HANGS: Final = Measure("hangs", _hangs, _ends, merged_by(_both), of="all")
MISMATCHES: Final = derived("mismatches", lambda whole: whole.found.of(HANGS).mismatches)
FAILURE: Final = derived("failure", lambda whole: whole.found.of(HANGS).failure)
STANDSTILL: Final = derived(
    "standstill", lambda whole: None if _hangs(whole) else whole.found.of(HANGS).standstill
)
