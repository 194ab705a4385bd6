"""Rows of collectives by operation, group and size, and of sends by pair of ranks.

`CollectiveRow` and `P2PRow` define the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, IntArray, by_place, changes
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.distribution import (
    Distribution,
    merged_records,
    merged_sums,
    with_rounded,
)
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, merged_by

_BITS_PER_BYTE: Final = 8
_SPREAD: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations in which (p - 1) / p of the whole vector cross each rank's link."""


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one operation, group and size in the analyzed window.

    Its arrivals are the ranks' `start_ns`. Its wait on a rank is the last arrival minus that
    rank's, its transfer is the last `end_ns` minus the last arrival, at least 0. Its size is that
    of the whole vector: of an all_gather or gather the largest `out_bytes` (without one, the
    largest `bytes` times the ranks of the group), else the largest `bytes`. Algorithm bandwidth is
    8 * size / transfer, of collectives whose transfer and size are above 0. Bus bandwidth is the
    algorithm bandwidth times a factor, after NVIDIA's nccl-tests: with p ranks of the group,
    2(p - 1)/p for all_reduce, (p - 1)/p for all_gather, reduce_scatter, all_to_all, gather and
    scatter, and 1 for others. It can be compared with the bandwidth of a link.

    Attributes:
        op: Public name in ``torch.distributed``.
        group: Name of the process group.
        group_size: Its members.
        count: Number of collectives, each counted once, not once per rank.
        bytes: Input bytes of one rank in one collective (the largest, if they differ).
        algbw_gbps: Algorithm bandwidth, median over collectives.
        busbw_gbps: Bus bandwidth, median over collectives.
        wait_us: Median over collectives of the mean over ranks of their wait.
        transfer_us: Median over collectives of their transfer.
        transfer_us_p95: 95th percentile of the same.
        arrival_skew_us: Median over collectives of the last arrival minus the first.
        wait_us_total: Sum over collectives and ranks of their wait.
        transfer_us_total: Sum over collectives of their transfer.
        incomplete: Number of these collectives that lack a rank or its end; they are excluded from
            the times.
        unsure: Whether the times are below the error of the aligned clocks.
    """

    op: str
    group: str
    group_size: int
    count: int
    bytes: int | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    wait_us: float | None
    transfer_us: float | None
    transfer_us_p95: float | None
    arrival_skew_us: float | None
    wait_us_total: float | None
    transfer_us_total: float | None
    incomplete: int
    unsure: bool


@dataclass(frozen=True)
class P2PRow:
    """Point-to-point messages from one rank to another.

    Attributes:
        src: Sending rank.
        dst: Receiving rank.
        count: Messages.
        bytes: Sum of their sizes; null if no size is known.
        wait_us: Sum of the times for which the receiver waits for the send to begin.
        transfer_us: Sum of receive end - the later of both starts.
        unmatched: Number of these messages that were recorded on one side only.
        transfer_us_p50: Median of receive end - the later of both starts.
        transfer_us_p95: 95th percentile of the same.
        algbw_gbps: Median over messages of bytes / transfer, gigabits per second.
        unsure: Whether the transfers are below the error of the aligned clocks.
    """

    src: int
    dst: int
    count: int
    bytes: int | None
    wait_us: float | None
    transfer_us: float | None
    unmatched: int
    transfer_us_p50: float | None = None
    transfer_us_p95: float | None = None
    algbw_gbps: float | None = None
    unsure: bool = False


@dataclass(frozen=True)
class Joining:
    """How well messages were found on all their ranks; of steps that were asked for, theirs.

    Attributes:
        collectives: Number of collectives.
        complete: Number of collectives that were recorded and completed on all their ranks.
        partial: Number of collectives that lack the message of a member.
        open: Number of collectives that did not complete on some rank.
        mismatched: Number of collectives on whose operation or size the ranks disagree; they are
            excluded from all times.
        by_order: Whether sequence numbers were missing and the order was used.
        p2p: Number of matched pairs of sends and receives.
        p2p_unmatched: Number of unmatched sends and receives.
    """

    collectives: int
    complete: int
    partial: int
    open: int
    mismatched: int
    by_order: bool
    p2p: int
    p2p_unmatched: int


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, after NVIDIA's nccl-tests (PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _SPREAD else 1.0


class CollectiveKind(NamedTuple):
    """What the collectives of one row have in common.

    Attributes:
        op: Operation.
        group: Name of the process group.
        group_size: Its members.
        bytes: Input bytes of one rank; `NULL` if unknown.
    """

    op: str
    group: str
    group_size: int
    bytes: int


@dataclass(frozen=True)
class CollectiveTimes:
    """Measured collectives of one kind, microseconds and gigabits per second.

    Attributes:
        count: How many there are.
        incomplete: How many of them lack a rank or its end, and are in none of the times.
        wait_total: Sum over collectives and ranks of the time to the last arrival.
        transfer_total: Sum of the transfers.
        wait: Mean over ranks of the time to the last arrival.
        transfer: Last end - last arrival.
        skew: Last arrival - first arrival.
        gbps: Algorithm bandwidth, of those with a known size.
    """

    count: int
    incomplete: int
    wait_total: float
    transfer_total: float
    wait: Distribution
    transfer: Distribution
    skew: Distribution
    gbps: Distribution


def _times(steps: JoinedSteps) -> dict[CollectiveKind, CollectiveTimes]:
    """Measures collectives by operation, group and size."""
    joined = steps.joined
    collectives, messages = joined.collectives, joined.messages
    index = np.flatnonzero(steps.chosen_collectives & (collectives.state != State.MISMATCH))
    if not len(index):
        return {}
    op, group, size = collectives.op[index], collectives.group[index], collectives.bytes[index]
    order = np.lexsort((size, group, op))
    index, op, group, size = index[order], op[order], group[order], size[order]
    new = np.flatnonzero(changes(op, group, size))
    found: dict[CollectiveKind, CollectiveTimes] = {}
    for begin, end in zip(new.tolist(), np.append(new[1:], len(index)).tolist(), strict=True):
        code = int(group[begin])
        kind = CollectiveKind(
            op=messages.ops[op[begin]],
            group=messages.groups[code],
            group_size=int(messages.group_size[code]),
            bytes=int(size[begin]),
        )
        times = _collective_times(joined, index[begin:end])
        # Ranks may use one name for different groups.
        found[kind] = merged_sums([found[kind], times]) if kind in found else times
    return {kind: with_rounded(each) for kind, each in found.items()} if steps.in_ranges else found


def _collective_times(joined: Joined, index: IntArray) -> CollectiveTimes:
    collectives = joined.collectives
    done = index[collectives.timed[index]]
    transfer = np.maximum(collectives.end[done] - collectives.last[done], 0) / 1e3
    wait = collectives.wait[done] / 1e3
    vector = collectives.size[done]
    timed = (transfer > 0) & (vector > 0)
    return CollectiveTimes(
        count=len(index),
        incomplete=len(index) - len(done),
        wait_total=float(wait.sum()),
        transfer_total=float(transfer.sum()),
        wait=Distribution(wait / collectives.ranks[done]),
        transfer=Distribution(transfer),
        skew=Distribution((collectives.last[done] - collectives.first[done]) / 1e3),
        gbps=Distribution(vector[timed] * _BITS_PER_BYTE / (transfer[timed] * 1e3)),
    )


def collective_rows(
    times: Mapping[CollectiveKind, CollectiveTimes], residual_ns: float | None
) -> tuple[CollectiveRow, ...]:
    """One row per operation, group and size, those with the longest transfer first.

    Args:
        times: See `CollectiveTimes`.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """
    rows = [_collective_row(kind, each, residual_ns) for kind, each in times.items()]
    return tuple(sorted(rows, key=lambda row: -(row.transfer_us_total or 0.0)))


def _collective_row(
    kind: CollectiveKind, times: CollectiveTimes, residual_ns: float | None
) -> CollectiveRow:
    algbw, median = times.gbps.median(), times.transfer.median()
    return CollectiveRow(
        op=kind.op,
        group=kind.group,
        group_size=kind.group_size,
        count=times.count,
        bytes=None if kind.bytes == NULL else kind.bytes,
        algbw_gbps=algbw,
        busbw_gbps=None if algbw is None else algbw * bus_factor(kind.op, kind.group_size),
        wait_us=times.wait.median(),
        transfer_us=median,
        transfer_us_p95=times.transfer.percentile(95),
        arrival_skew_us=times.skew.median(),
        wait_us_total=None if median is None else times.wait_total,
        transfer_us_total=None if median is None else times.transfer_total,
        incomplete=times.incomplete,
        unsure=residual_ns is None or (median is not None and 0 < residual_ns > median * 1e3),
    )


@dataclass(frozen=True)
class LinkTimes:
    """Measured sends and receives from one rank to another, nanoseconds.

    Attributes:
        count: Messages.
        sized: Those whose size is known.
        bytes: Sum of these sizes.
        timed: Messages whose times are known.
        wait: Sum of the times for which the receiver waits for the send to begin.
        unmatched: Messages that were recorded on one side only.
        transfer_total: Sum of the transfers.
        transfer: Receive end - the later of both starts.
        gbps: Bytes / transfer, gigabits per second.
    """

    count: int
    sized: int
    bytes: int
    timed: int
    wait: int
    unmatched: int
    transfer_total: int
    transfer: Distribution
    gbps: Distribution


def find_links(steps: JoinedSteps) -> dict[tuple[int, int], LinkTimes]:
    """Measures sends and receives by sending and receiving rank."""
    joined, chosen = steps.joined, steps.chosen_messages
    messages = joined.messages
    wait, transfer = joined.wait_and_transfer()
    matched = joined.partner != NULL
    sends = messages.op_is("send")
    # A pair is counted at its receive, which knows when the data had come; a send that found
    # no receive, or the other way round, at whichever side was seen.
    rows = np.flatnonzero(chosen & messages.is_p2p & (messages.peer != NULL) & (~sends | ~matched))
    rank, peer = messages.rank[rows], messages.peer[rows]
    source = np.where(sends[rows], rank, peer)
    target = np.where(sends[rows], peer, rank)
    size = np.where(matched[rows], messages.bytes[joined.partner[rows]], messages.bytes[rows])
    size = np.where(size == NULL, messages.out_bytes[rows], size)
    pairs, which = np.unique(np.stack([source, target]), axis=1, return_inverse=True)
    found = {}
    of_pair = by_place(which, pairs.shape[1])
    for (src, dst), places in zip(pairs.T.tolist(), of_pair, strict=True):
        mine = rows[places]
        kept = matched[mine] & (wait[mine] != NULL)
        timed, took = mine[kept], transfer[mine[kept]]
        moved = (took > 0) & (size[places[kept]] > 0)
        sizes = size[places][size[places] != NULL]
        found[src, dst] = LinkTimes(
            count=len(mine),
            sized=len(sizes),
            bytes=int(sizes.sum()),
            timed=len(timed),
            wait=int(wait[timed].sum()),
            unmatched=int((~matched[mine]).sum()),
            transfer_total=int(took.sum()),
            transfer=Distribution(took.astype(np.float64)),
            gbps=Distribution(size[places[kept]][moved] * _BITS_PER_BYTE / took[moved]),
        )
    return found


def p2p_rows(
    times: Mapping[tuple[int, int], LinkTimes], residual_ns: float | None
) -> tuple[P2PRow, ...]:
    """One row per pair of ranks, the largest first.

    Args:
        times: See `find_links`.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """
    rows = []
    for (src, dst), link in times.items():
        median, high = link.transfer.median(), link.transfer.percentile(95)
        unsure = residual_ns is None or (median is not None and 0 < residual_ns > median)
        rows.append(
            P2PRow(
                src=src,
                dst=dst,
                count=link.count,
                bytes=link.bytes if link.sized else None,
                wait_us=link.wait / 1e3 if link.timed else None,
                transfer_us=link.transfer_total / 1e3 if link.timed else None,
                unmatched=link.unmatched,
                transfer_us_p50=None if median is None else median / 1e3,
                transfer_us_p95=None if high is None else high / 1e3,
                algbw_gbps=link.gbps.median(),
                unsure=bool(unsure),
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.bytes or 0)))


def _joining(steps: JoinedSteps) -> Joining:
    """How well messages could be joined across ranks."""
    joined = steps.joined
    state = joined.collectives.state[steps.chosen_collectives]
    p2p = joined.messages.is_p2p & steps.chosen_messages
    matched = p2p & (joined.partner != NULL)
    return Joining(
        collectives=len(state),
        complete=int((state == State.COMPLETE).sum()),
        partial=int((state == State.PARTIAL).sum()),
        open=int((state == State.OPEN).sum()),
        mismatched=int((state == State.MISMATCH).sum()),
        by_order=joined.by_order,
        p2p=int(matched.sum()) // 2,
        p2p_unmatched=int((p2p & ~matched).sum()),
    )


def _links(joined: JoinedSteps) -> dict[tuple[int, int], LinkTimes]:
    links = joined.once(find_links)
    return {pair: with_rounded(each) for pair, each in links.items()} if joined.in_ranges else links


def _both(former: Joining, later: Joining) -> Joining:
    by_order = former.by_order or later.by_order
    return replace(merged_sums([former, later]), by_order=by_order)


JOINING: Final[Measure[Joining, Joining]] = Measure(
    "joining", lambda whole: whole.found.of(JOINING), _joining, merged_by(_both)
)
COLLECTIVES: Final[Measure[dict[CollectiveKind, CollectiveTimes], tuple[CollectiveRow, ...]]] = (
    Measure(
        "collectives",
        lambda whole: collective_rows(whole.found.of(COLLECTIVES), whole.residual_ns),
        _times,
        merged_by(merged_records),
    )
)
P2P: Final[Measure[dict[tuple[int, int], LinkTimes], tuple[P2PRow, ...]]] = Measure(
    "p2p",
    lambda whole: p2p_rows(whole.found.of(P2P), whole.residual_ns),
    _links,
    merged_by(merged_records),
)
