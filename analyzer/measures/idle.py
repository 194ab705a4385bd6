"""Causes of idle time: a rank is idle if it neither computes, copies nor communicates.

Each idle instant has one cause, the first of these that applies:

- *data*: the host fetches a batch;
- *other rank*: the host is blocked on a message that another rank has not yet entered;
- *message*: the host is blocked on a message that all ranks have entered or whose missing ranks are
  unknown; or a message is open that never completed;
- *host*: the host is in a step, a phase or other recorded work: host code delays the device, or on
  a CPU rank the model;
- *stopped*: no thread of the process ran: it was stopped, or suspended with its host;
- *unknown*: there is no record of that instant.

A message in flight is communication, not idle time, even if it only waits for another rank. The
time in which the rank does nothing but wait in messages is reported separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS
from ddltrace.analyzer.events.interval_sets import (
    Spans,
    lengths_within,
    merge,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Releases

_MOST_WAITED_FOR: Final = 4

WaitedFor: TypeAlias = tuple[tuple[int, int], ...]
"""The ranks for which a rank waits the longest inside of messages, and how long, ns."""


@dataclass(frozen=True)
class IdleShares:
    """Idle time by cause, over all ranks and steady steps, as shares of their time.

    The causes are those of `IdleRow`; all but `in_message_share` sum to `Summary.idle_share`.

    Attributes:
        data_share: Share of `IdleRow.data_us`.
        other_rank_share: Share of `IdleRow.other_rank_us`.
        message_share: Share of `IdleRow.message_us`.
        host_share: Share of `IdleRow.host_us`.
        stopped_share: Share of `IdleRow.stopped_us`.
        unknown_share: Share of `IdleRow.unknown_us`.
        in_message_share: Share of `IdleRow.in_message_us`.
    """

    data_share: float | None
    other_rank_share: float | None
    message_share: float | None
    host_share: float | None
    stopped_share: float | None
    unknown_share: float | None
    in_message_share: float | None


@dataclass(frozen=True)
class IdleRow:
    """Idle time of one rank by cause, over the span of its device work.

    Attributes:
        rank: Global rank.
        idle_us: Idle time as in `RankRow.idle_us`; the sum of the next six values.
        data_us: The host fetches a batch.
        other_rank_us: The host is blocked on a message that another rank has not yet entered.
        message_us: The host is blocked on another message, or a message is open that never
            completed.
        host_us: The host runs code in a step, a phase or other recorded work.
        stopped_us: No thread of the process ran: it was stopped, or suspended with its host.
        unknown_us: Nothing was recorded at that time.
        in_message_us: Not part of the idle time: time in which the rank only waits in messages, all
            of which wait for another rank.
        waits_for: The rank that it waits for most in messages; None for none.
    """

    rank: int
    idle_us: float | None
    data_us: float | None
    other_rank_us: float | None
    message_us: float | None
    host_us: float | None
    stopped_us: float | None
    unknown_us: float | None
    in_message_us: float | None
    waits_for: int | None


@dataclass(frozen=True)
class IdleSets:
    """The idle instants of a rank whose cause is known: disjoint sets, see above."""

    data: Spans
    other_rank: Spans
    message: Spans
    host: Spans
    stopped: Spans


def idle_sets(scan: RankScan, releases: Releases) -> IdleSets:
    """Finds the idle instants of each cause on one rank."""
    activity, waits, messages = scan.activity, scan.waits, scan.messages
    # What indexes with NULL, a wait for an unknown message, gets the last entry.
    released = np.append(releases.released, NULL_NS)[waits.message]
    releaser = np.append(releases.releaser, NULL)[waits.message]
    late = (released != NULL_NS) & (releaser != scan.rank) & (waits.end > waits.start)
    came = np.clip(released[late], waits.start[late], waits.end[late])
    unfinished = messages.start[messages.unfinished]
    blocked = merge(activity.blocked, union(unfinished, np.full(len(unfinished), scan.last)))
    data = subtract(activity.data, activity.work)
    known = merge(activity.work, data)
    other_rank = subtract(union(waits.start[late], came), known)
    known = merge(known, other_rank)
    message = subtract(blocked, known)
    known = merge(known, message)
    host = subtract(activity.host, known)
    stopped = subtract(activity.stopped, merge(known, host))
    return IdleSets(data, other_rank, message, host, stopped)


def idle_row(rank: int, total: Mapping[str, float], waited_for: WaitedFor) -> IdleRow:
    """One rank's idle time by cause.

    Args:
        total: Its measures from the first start to the last end of its device work, see
            `ddltrace.analyzer.measures.breakdown.FIELDS`.
        waited_for: The ranks for which it waits in that time.
    """

    def us(name: str) -> float | None:
        value = total[f"{name}_ns"]
        return None if np.isnan(value) else value / 1e3

    return IdleRow(
        rank=rank,
        idle_us=us("idle"),
        data_us=us("idle_data"),
        other_rank_us=us("idle_other_rank"),
        message_us=us("idle_message"),
        host_us=us("idle_host"),
        stopped_us=us("idle_stopped"),
        unknown_us=us("idle_unknown"),
        in_message_us=us("exposed_wait"),
        waits_for=waited_for[0][0] if waited_for else None,
    )


def find_waited_for(scan: RankScan, releases: Releases, waiting: Spans) -> WaitedFor:
    """The ranks for which a rank waits inside of messages.

    Args:
        releases: When its messages were released, and by whom.
        waiting: When it does nothing but wait inside of messages.
    """
    released, releaser = releases
    late = (released != NULL_NS) & (releaser != scan.rank) & (releaser != NULL)
    start = scan.messages.start[late]
    came = np.maximum(released[late], start)
    waited = np.bincount(releaser[late], weights=lengths_within(waiting, start, came))
    longest = np.argsort(-waited, kind="stable")[:_MOST_WAITED_FOR].tolist()
    return tuple((rank, int(waited[rank])) for rank in longest if waited[rank])


def idle_shares(share: Callable[[str], float | None]) -> IdleShares:
    """Idle time by cause over ranks and steps, each a share of their time.

    Args:
        share: Gives the share of a measure, see `ddltrace.analyzer.measures.breakdown.FIELDS`.
    """
    return IdleShares(
        data_share=share("idle_data_ns"),
        other_rank_share=share("idle_other_rank_ns"),
        message_share=share("idle_message_ns"),
        host_share=share("idle_host_ns"),
        stopped_share=share("idle_stopped_ns"),
        unknown_share=share("idle_unknown_ns"),
        in_message_share=share("exposed_wait_ns"),
    )
