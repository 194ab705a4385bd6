"""Collectives that some ranks entered and that never completed: missing ranks and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, distinct
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.last_activity import at_place, last_activity, last_silence
from ddltrace.analyzer.measures.process_ends import KnownActivity, ProcessLifetimes, end_of_trace
from ddltrace.analyzer.model import Hang, Standstill, stuck_ranks

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_PATIENCE: Final = 10
"""In a job that still runs, a message is hung when it has been open for this many times the
longest that any other took, and for a second at least."""

_MIN_WAIT_NS: Final = 1_000_000_000
_USUAL: Final = 0.9
"""A job that was ended in the middle of its work had messages in flight, too: those that took no
longer than this part of the others, or a second, did not hang."""

_MAX_SHOWN: Final = 20


def find_hangs(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, origin_ns: int
) -> tuple[Hang, ...]:
    """Finds messages that never completed, causes first.

    A member is *missing* when the trace has events of it and it never entered the collective,
    or never sent what another one waits to receive. While a job runs, some messages are in
    flight at any moment; those only count when they have been so for far too long. One that
    failed after a long wait hung, too, until its rank gave up. What a rank did last is not
    written if it was killed: then it is unknown whether its last message ended, or a next one
        began.
    """
    messages, collectives = joined.messages, joined.collectives
    timed = messages.end != NULL_NS
    gave_up = messages.failed & timed & (messages.end - messages.start >= _MIN_WAIT_NS)
    is_open = messages.unfinished | gave_up
    found = distinct(joined.collective[is_open & (joined.collective != NULL)])
    unmatched = np.flatnonzero(
        is_open & messages.is_p2p & (joined.partner == NULL) & (messages.peer != NULL)
    )
    if not len(found) and not len(unmatched):
        return ()
    now = end_of_trace(trace, scans)
    worked = timed & ~gave_up
    durations = messages.end[worked] - messages.start[worked]
    if trace.run.status == "running":
        patience = max(_PATIENCE * int(durations.max(initial=0)), _MIN_WAIT_NS)
    else:
        usual = float(np.quantile(durations, _USUAL)) if len(durations) else 0.0
        patience = min(int(usual), _MIN_WAIT_NS)

    lifetimes = ProcessLifetimes(trace)
    known = KnownActivity(trace, scans, lifetimes, now)

    def waited_us(rows: Iterable[int], since_ns: int) -> float | None:
        """How long the last rank is known to have waited: until it gave up, or until it ended."""
        ends = [
            int(messages.end[row])
            if timed[row]
            else known.until(int(messages.rank[row]), int(messages.start[row]))
            for row in rows
            if is_open[row]
        ]
        return max((max(0, end - since_ns) / 1e3 for end in ends if end is not None), default=None)

    def is_hang(waited: float | None) -> bool:
        return trace.run.status != "running" if waited is None else waited >= patience / 1e3

    hangs = []
    counts = np.diff(np.append(collectives.first_row, len(joined.order)))
    for i in found.tolist():
        last = int(collectives.last[i])
        rows = joined.order[collectives.first_row[i] : collectives.first_row[i] + counts[i]]
        group = int(collectives.group[i])
        called = {int(messages.rank[row]): messages.ops[messages.op[row]] for row in rows}
        waited = waited_us(rows, last)
        if not is_hang(waited):
            continue
        missing = set(messages.members[group] or trace.ranks) - set(called)
        if known.may_have_come(missing, last):
            continue
        hangs.append(
            Hang(
                op=messages.ops[collectives.op[i]],
                group=messages.groups[group],
                seq=int(collectives.seq[i]),
                entered=tuple(sorted(called)),
                missing=tuple(sorted(missing)),
                since_us=(last - origin_ns) / 1e3,
                waited_us=waited,
                called=dict(sorted(called.items())) if len(set(called.values())) > 1 else {},
            )
        )
    for row in unmatched.tolist():
        start, rank = int(messages.start[row]), int(messages.rank[row])
        waited, peer = waited_us([row], start), int(messages.peer[row])
        if is_hang(waited) and not known.may_have_come([peer], start):
            hangs.append(
                Hang(
                    op=messages.ops[messages.op[row]],
                    group=messages.groups[messages.group[row]],
                    seq=None if messages.seq[row] == NULL else int(messages.seq[row]),
                    entered=(rank,),
                    missing=(peer,),
                    since_us=(start - origin_ns) / 1e3,
                    waited_us=waited,
                )
            )
    # A rank that hangs in another message is not the cause, so it comes last.
    stuck = stuck_ranks(hangs)
    hangs.sort(
        key=lambda hang: (
            sum(rank in stuck for rank in hang.missing),
            -len(hang.missing),
            hang.since_us,
        )
    )
    return tuple(
        _with_activities(trace, lifetimes, hang, stuck, origin_ns) for hang in hangs[:_MAX_SHOWN]
    )


def has_lasted(hang: Hang) -> bool:
    """Whether ranks hung for longer than the end of one rank would explain."""
    return hang.waited_us is None or hang.waited_us * 1e3 >= _MIN_WAIT_NS


def find_standstill(trace: Trace, scans: Mapping[int, RankScan]) -> Standstill | None:
    """Finds out whether all ranks have stopped recording, in a job whose end was not observed."""
    infos = {info.rank: info for info in trace.run.ranks}
    if not infos or any(info.status == "complete" or not info.silence for info in infos.values()):
        return None
    doing, since = {}, []
    for rank in trace.ranks:
        silence = last_silence(trace, rank)
        if silence is None:
            return None
        doing[rank] = at_place(silence)
        since.append(trace.moment(infos[rank], silence["since_ns"]))
    now = end_of_trace(trace, scans)
    return Standstill(doing, None if now is None else max(now - max(since), 0) / 1e3)


def _with_activities(
    trace: Trace, lifetimes: ProcessLifetimes, hang: Hang, stuck: frozenset[int], origin_ns: int
) -> Hang:
    at_ns = origin_ns + round(hang.since_us * 1e3)
    present = set(trace.ranks)
    missing = sorted(hang.missing, key=lambda rank: rank in stuck)
    shown = (*missing[:_MAX_SHOWN], *hang.entered[:_MAX_SHOWN])
    activities = {
        rank: last_activity(trace, lifetimes, rank, at_ns).text
        if rank in present
        else "left no trace"
        for rank in shown
    }
    return Hang(**{**vars(hang), "doing": activities})
