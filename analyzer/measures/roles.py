"""The roles of a job: trainers and rollout workers, for example, and how they wait for each other.

A role is what the job says of a process (``role`` in ``run.json``). A message *crosses* roles if
the ranks of its group have several roles, or if its sender and receiver differ in theirs. Each
instant of a rank is one of three: *busy* if the rank computes, copies, fetches data or exchanges
messages with its own role; else *crossing* in a message that crosses roles; else *idle*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, IntArray, distinct
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Spans,
    intersect,
    length,
    merge,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, time_text
from ddltrace.analyzer.joined.join import AllMessages
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Table, merged_by

_NO_ROLE: Final = "(none)"

Role: TypeAlias = str | None


@dataclass(frozen=True)
class RoleRow:
    """One role of a job that has several, in the steady steps; without steps, in all the trace.

    Times are means over the ranks of the role, and sums over the steps.

    Attributes:
        role: Its name; null for the ranks whose role the job does not say.
        ranks: Its ranks.
        wall_us: Time in all.
        busy_us: Time in which a rank computes, copies, fetches data or exchanges messages with its
            own role; null if the trace does not contain the compute of some of its ranks.
        crossing_us: Time in messages that cross roles, such as those that synchronize weights, in
            which the rank is not busy; null as above.
        idle_us: The rest; null as above.
        idle_share: The rest as a share of all time; null as above.
        idle_beside: The other role that is busy in most of the idle time; null if none is, or if
            that is not known.
        idle_beside_us: How much of the idle time some rank of that role is busy; null as above.
        messages: Messages that cross roles in which it takes part, each counted once.
        bytes: Bytes of those whose size is known; null without any.
        wait_us: Time in these messages until the rank that it needs has entered them.
        waits_for: The role of the rank that entered last, for most of this time; null if it
            never waits.
        waits_for_us: How long for this role; null if it never waits.
    """

    role: str | None
    ranks: tuple[int, ...]
    wall_us: float
    busy_us: float | None
    crossing_us: float | None
    idle_us: float | None
    idle_share: float | None
    idle_beside: str | None
    idle_beside_us: float | None
    messages: int
    bytes: int | None
    wait_us: float
    waits_for: str | None
    waits_for_us: float | None


@dataclass(frozen=True)
class _Sums:
    """Sums over the ranks of one role, ns; not a number where that is not known.

    Attributes:
        wall: Time in all, of one rank.
        beside: Other role -> idle time in which some rank of it is busy.
        waits: Role -> waiting for its ranks.
    """

    ranks: tuple[int, ...]
    wall: float
    busy: float
    crossing: float
    idle: float
    beside: dict[Role, float]
    messages: int
    bytes: int | None
    wait: float
    waits: dict[Role, float]

    def plus(self, later: _Sums) -> _Sums:
        """The sums over the steps of both."""
        return _Sums(
            ranks=self.ranks,
            wall=self.wall + later.wall,
            busy=self.busy + later.busy,
            crossing=self.crossing + later.crossing,
            idle=self.idle + later.idle,
            beside=_added(self.beside, later.beside),
            messages=self.messages + later.messages,
            bytes=later.bytes if self.bytes is None else self.bytes + (later.bytes or 0),
            wait=self.wait + later.wait,
            waits=_added(self.waits, later.waits),
        )

    def row(self, role: Role) -> RoleRow:
        """The means over the ranks."""
        count = len(self.ranks) * 1e3
        known = not np.isnan(self.idle)
        beside, beside_ns = _largest(self.beside if known else {})
        waits_for, waits_for_ns = _largest(self.waits)
        return RoleRow(
            role=role,
            ranks=self.ranks,
            wall_us=self.wall / 1e3,
            busy_us=self.busy / count if known else None,
            crossing_us=self.crossing / count if known else None,
            idle_us=self.idle / count if known else None,
            idle_share=self.idle / len(self.ranks) / self.wall if known and self.wall else None,
            idle_beside=beside,
            idle_beside_us=None if beside_ns is None else beside_ns / count,
            messages=self.messages,
            bytes=self.bytes,
            wait_us=self.wait / count,
            waits_for=waits_for,
            waits_for_us=None if waits_for_ns is None else waits_for_ns / count,
        )


@dataclass(frozen=True)
class _RankTimes:
    """What one rank does in the window; `known` says whether its compute is."""

    known: bool
    busy: Spans
    crossing: Spans
    idle: Spans
    wait: float
    waits: dict[Role, float]


def _found(steps: JoinedSteps) -> dict[Role, _Sums]:
    role_of = {rank: steps.trace.infos(rank)[-1].role for rank in steps.scans}
    names = sorted(set(role_of.values()), key=lambda role: (role is None, role or ""))
    if len(names) < 2:
        return {}
    code = np.full(max(role_of) + 1, NULL)
    for rank, role in role_of.items():
        code[rank] = names.index(role)
    window = _window(steps)
    crosses = _crosses(steps.joined.messages, code)
    times = {
        rank: _rank_times(steps, scan, window, crosses, role_of)
        for rank, scan in steps.scans.items()
    }
    ranks_of = {role: tuple(r for r, its in role_of.items() if its == role) for role in names}
    busy = {role: _busy_of(times, ranks) for role, ranks in ranks_of.items()}
    counted = crosses & _starts_in(steps.joined.messages.start, window)
    found = {}
    for number, (role, ranks) in enumerate(ranks_of.items()):
        mine = [times[rank] for rank in ranks]
        messages, size = _count(
            steps, np.flatnonzero(counted & (code[steps.joined.messages.rank] == number))
        )
        known = busy[role] is not None
        beside = {
            other: float(sum(length(intersect(one.idle, theirs)) for one in mine))
            for other, theirs in busy.items()
            if other != role and theirs is not None
        }
        found[role] = _Sums(
            ranks=ranks,
            wall=float(length(window)),
            busy=_total(one.busy for one in mine) if known else np.nan,
            crossing=_total(one.crossing for one in mine) if known else np.nan,
            idle=_total(one.idle for one in mine) if known else np.nan,
            beside=beside,
            messages=messages,
            bytes=size,
            wait=sum(one.wait for one in mine),
            waits=_added(*(one.waits for one in mine)),
        )
    return found


def _window(steps: JoinedSteps) -> Spans:
    """The time of the steady steps; without steps, from the first event to the last."""
    if len(steps.steps):
        steady = steps.steps.steady
        return union(steps.steps.start[steady], steps.steps.end[steady])
    scans = [scan for scan in steps.scans.values() if scan.events]
    if not scans:
        return EMPTY
    first, last = min(scan.first for scan in scans), max(scan.last for scan in scans)
    return union(np.array([first]), np.array([last]))


def _crosses(messages: AllMessages, code: IntArray) -> BoolArray:
    """Whether each message crosses roles.

    Args:
        messages: The messages of all ranks.
        code: Number of each rank's role; `NULL` for a rank that recorded nothing.
    """
    own = code[messages.rank]
    peer = np.where(messages.peer < len(code), messages.peer, NULL)
    theirs = np.where(peer == NULL, NULL, code[peer])
    count = int(code.max()) + 1
    several = np.zeros(len(messages.groups), dtype=bool)
    seen = np.bincount(distinct(messages.group * count + own) // count, minlength=len(several))
    for number, members in enumerate(messages.members):
        known = code[[rank for rank in members if rank < len(code)]]
        roles = len(distinct(known[known != NULL])) if len(members) else seen[number]
        several[number] = roles > 1
    other = (theirs != NULL) & (theirs != own)
    return np.asarray(np.where(messages.is_p2p, other, several[messages.group]))


def _rank_times(
    steps: JoinedSteps,
    scan: RankScan,
    window: Spans,
    crosses: BoolArray,
    role_of: Mapping[int, Role],
) -> _RankTimes:
    messages, releases = scan.messages, steps.joined.releases(scan.rank)
    counted = messages.in_flight & messages.closed
    crossing = counted & crosses[steps.joined.rows(scan.rank)]
    own = counted & ~crossing
    activity = scan.activity
    busy = intersect(
        merge(
            EMPTY if activity.compute is None else activity.compute,
            *(activity.copies, activity.data),
            union(messages.start[own], messages.end[own]),
        ),
        window,
    )
    outside = subtract(union(messages.start[crossing], messages.end[crossing]), busy)
    between = intersect(outside, window)
    held = crossing & (releases.released != NULL_NS) & (releases.releaser != NULL)
    start = messages.start[held]
    came = np.minimum(np.maximum(releases.released[held], start), messages.end[held])
    releaser = [role_of[rank] for rank in releases.releaser[held].tolist()]
    waits = {}
    for role in dict.fromkeys(releaser):
        its = np.array([other == role for other in releaser])
        waited = length(intersect(union(start[its], came[its]), window))
        if waited:
            waits[role] = float(waited)
    return _RankTimes(
        known=scan.events > 0 and activity.compute is not None,
        busy=busy,
        crossing=between,
        idle=subtract(window, merge(busy, between)),
        wait=float(length(intersect(union(start, came), window))),
        waits=waits,
    )


def _busy_of(times: Mapping[int, _RankTimes], ranks: tuple[int, ...]) -> Spans | None:
    """When some of these ranks is busy; None if that is not known of each of them."""
    mine = [times[rank] for rank in ranks]
    return merge(*(one.busy for one in mine)) if all(one.known for one in mine) else None


def _starts_in(start: IntArray, window: Spans) -> BoolArray:
    place = np.searchsorted(window.start, start, side="right") - 1
    return np.asarray((place >= 0) & (start < np.append(window.end, NULL)[place]))


def _count(steps: JoinedSteps, rows: IntArray) -> tuple[int, int | None]:
    """How many messages some rows are of, and their bytes.

    A collective has a row on each of its ranks.
    """
    messages, collectives = steps.joined.messages, steps.joined.collectives
    of_row = steps.joined.collective[rows]
    single = rows[of_row == NULL]
    which = distinct(of_row[of_row != NULL])
    sent = np.where(messages.bytes == NULL, messages.out_bytes, messages.bytes)[single]
    size = np.concatenate([collectives.size[which], sent])
    known = size[size != NULL]
    return len(size), int(known.sum()) if len(known) else None


def _total(parts: Iterable[Spans]) -> float:
    return float(sum(map(length, parts)))


def _added(*parts: Mapping[Role, float]) -> dict[Role, float]:
    """The sums of equal keys."""
    total: dict[Role, float] = {}
    for part in parts:
        for role, value in part.items():
            total[role] = total.get(role, 0.0) + value
    return total


def _largest(values: Mapping[Role, float]) -> tuple[Role, float | None]:
    """The role with the largest value, and the value; two None if none is above zero."""
    role = max(values, key=lambda role: values[role], default=None)
    return (role, values[role]) if values and values[role] > 0 else (None, None)


def _both(former: dict[Role, _Sums], later: dict[Role, _Sums]) -> dict[Role, _Sums]:
    return {role: sums.plus(later[role]) for role, sums in former.items()}


def _rows(found: dict[Role, _Sums]) -> tuple[RoleRow, ...]:
    return tuple(sums.row(role) for role, sums in found.items())


def _for_whom(role: Role, us: float | None) -> str:
    return NOT_KNOWN if us is None else f"{printable(role or _NO_ROLE)} ({time_text(us)})"


ROLES: Final[Measure[dict[Role, _Sums], tuple[RoleRow, ...]]] = Measure(
    "roles",
    lambda whole: _rows(whole.found.of(ROLES)),
    _found,
    merged_by(_both),
    of="steady",
    rows=RoleRow,
    table=Table[RoleRow](
        "Roles, means of their ranks (crossing: in messages between roles; beside: busy meanwhile)",
        {
            "role": lambda row: printable(row.role or _NO_ROLE),
            "ranks": lambda row: str(len(row.ranks)),
            "busy": "busy_us",
            "crossing": "crossing_us",
            "idle": "idle_us",
            "share": "idle_share",
            "beside": lambda row: _for_whom(row.idle_beside, row.idle_beside_us),
            "messages": "messages",
            "bytes": "bytes",
            "waiting": "wait_us",
            "waits for": lambda row: _for_whom(row.waits_for, row.waits_for_us),
        },
    ),
)
