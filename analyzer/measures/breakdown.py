"""Time breakdown of windows on one rank: compute, communication, waiting, idle.

With C, M and K the rank's compute, communication and copies (see
`ddltrace.analyzer.events.rank_activity`) and W a window, all in nanoseconds:
compute = |C n W|, comm = |M n W|, overlap = |C n M n W|,
exposed = |(M \\ C) n W|, copy = |(K \\ (C u M)) n W|, idle = |W| - |(C u M u K) n W|. So
compute + exposed + copy + idle = |W| exactly.

comm = waiting + transfer + unjoined: *transfer* is the time in which a message is in flight whose
ranks have all arrived, *unjoined* the time in which none of the messages in flight could be joined
with those of other ranks, *waiting* the rest of M. *sync* is the time in which a message waits for
another rank and this rank does not compute. *exposed_wait* and *exposed_transfer* are waiting
and transfer without C and, of waiting, K. idle is the sum of its causes, see
`ddltrace.analyzer.measures.idle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL_NS, BoolArray, FloatArray, IntArray
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Spans,
    intersect,
    lengths_within,
    merge,
    subtract,
    union,
)
from ddltrace.analyzer.events.rank_messages import Messages
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Releases
from ddltrace.analyzer.measures.idle import IdleSets, idle_sets

FIELDS: Final = (
    "wall_ns",
    "compute_ns",
    "comm_ns",
    "overlap_ns",
    "exposed_ns",
    "copy_ns",
    "idle_ns",
    "waiting_ns",
    "transfer_ns",
    "sync_ns",
    "blocked_ns",
    "data_ns",
    "update_ns",
    "update_alone_ns",
    "host_ns",
    "stopped_ns",
    "exposed_wait_ns",
    "exposed_transfer_ns",
    "idle_data_ns",
    "idle_other_rank_ns",
    "idle_message_ns",
    "idle_host_ns",
    "idle_stopped_ns",
    "idle_unknown_ns",
    "idle_in_phase_ns",
    "launch_gap_ns",
)
"""Results of `measure_windows`. `update_alone_ns` is the optimizer's time on the host without
communication, zero on a rank with recorded device work. `host_ns` is the time outside compute,
data, update, copies, blocked, stopped and unrecorded times and, on a rank with recorded device
work, outside communication. `idle_in_phase_ns` is the part of `idle_host_ns` inside of phases,
`launch_gap_ns` that in gaps of at most `MAX_LAUNCH_GAP_NS`; both are zero on a rank
without device work."""

MAX_LAUNCH_GAP_NS: Final = 1_000_000
"""The host needs less to launch the next kernel of an operator, even while it is profiled: some 5
us for the call and up to some 200 us for the operator around it. A longer gap has another cause."""


@dataclass(frozen=True)
class RankSets:
    """The sets of instants of one rank on which windows are measured.

    Attributes:
        transfer: Some message in flight has all its ranks.
        waiting: Messages are in flight and all of them wait for another rank.
        sync: A message waits for another rank, and this rank does not compute.
        exposed_waiting: The rank does nothing but wait inside of messages.
        exposed_transfer: Some message in flight has all its ranks, and this rank does not compute.
        idle: The idle instants by cause.
        idle_in_phase: Those for host code, inside of phases.
        launch_gaps: Those for host code, in gaps of at most `MAX_LAUNCH_GAP_NS`.
        extra_copies: Copies while the rank neither computes nor communicates.
        update_alone: The optimizer computes on the host, without communication.
        busy_host: Instants of other host code.
        joined: Whether any message is joined with those of other ranks.
    """

    scan: RankScan
    transfer: Spans
    waiting: Spans
    sync: Spans
    exposed_waiting: Spans
    exposed_transfer: Spans
    idle: IdleSets
    idle_in_phase: Spans
    launch_gaps: Spans
    extra_copies: Spans
    update_alone: Spans
    busy_host: Spans
    joined: bool


class InFlight(NamedTuple):
    """When messages are in flight.

    Attributes:
        known: Which of the messages count and have a known release.
        held: Some of these waits for another rank.
        transfer: Some of these has all its ranks.
        waiting: All messages in flight wait for another rank.
    """

    known: BoolArray
    held: Spans
    transfer: Spans
    waiting: Spans


def in_flight(messages: Messages, releases: Releases, counted: BoolArray) -> InFlight:
    """Divides the time in which messages are in flight.

    Args:
        messages: The messages of a rank.
        releases: When they were released.
        counted: Which of them count; they have ended.
    """
    start, end, released = messages.start, messages.end, releases.released
    known = counted & (released != NULL_NS)
    unknown = counted & ~known
    came = np.clip(released[known], start[known], end[known])
    held, transfer = union(start[known], came), union(came, end[known])
    waiting = subtract(subtract(held, transfer), union(start[unknown], end[unknown]))
    return InFlight(known, held, transfer, waiting)


def rank_sets(scan: RankScan, releases: Releases) -> RankSets:
    """Prepares a rank's sets."""
    counted = scan.messages.in_flight & scan.messages.closed
    flight = in_flight(scan.messages, releases, counted)
    held, transfer, waiting = flight.held, flight.transfer, flight.waiting
    activity = scan.activity
    compute = EMPTY if activity.compute is None else activity.compute
    idle = idle_sets(scan, releases)
    host = idle.host if activity.device else EMPTY
    in_phase = intersect(host, activity.phases)
    short = host.end - host.start <= MAX_LAUNCH_GAP_NS
    return RankSets(
        scan=scan,
        transfer=transfer,
        waiting=waiting,
        sync=subtract(held, compute),
        exposed_waiting=subtract(waiting, merge(compute, activity.copies)),
        exposed_transfer=subtract(transfer, compute),
        idle=idle,
        idle_in_phase=in_phase,
        launch_gaps=Spans(host.start[short], host.end[short]),
        extra_copies=subtract(activity.copies, merge(compute, activity.comm)),
        update_alone=(
            EMPTY
            if activity.device
            else intersect(subtract(compute, activity.comm), activity.update)
        ),
        busy_host=merge(
            compute,
            activity.data,
            activity.update,
            activity.blocked,
            activity.copies,
            activity.comm if activity.device else EMPTY,
            activity.unrecorded,
            activity.stopped,
        ),
        joined=bool(flight.known.any()) or (activity.comm_known and not counted.any()),
    )


def measure_windows(sets: RankSets, start: IntArray, end: IntArray) -> dict[str, FloatArray]:
    """Measures a rank in windows.

    Returns:
        For each of `FIELDS`, one number per window; NaN if the trace does not contain it.
    """
    activity = sets.scan.activity
    unknown = np.full(len(start), np.nan)

    def within(spans: Spans) -> FloatArray:
        return lengths_within(spans, start, end).astype(np.float64)

    wall = (end - start).astype(np.float64)
    comm, overlap = within(activity.comm), within(activity.both)
    computes = activity.compute is not None and activity.comm_known
    idle = wall - within(activity.work) if computes else unknown
    causes = {
        "idle_data_ns": within(sets.idle.data),
        "idle_other_rank_ns": within(sets.idle.other_rank),
        "idle_message_ns": within(sets.idle.message),
        "idle_host_ns": within(sets.idle.host),
        "idle_stopped_ns": within(sets.idle.stopped),
    }
    return {
        "wall_ns": wall,
        "compute_ns": within(activity.compute) if activity.compute is not None else unknown,
        "comm_ns": comm if activity.comm_known else unknown,
        "overlap_ns": overlap if computes else unknown,
        "exposed_ns": comm - overlap if computes else unknown,
        "copy_ns": within(sets.extra_copies),
        "idle_ns": idle,
        "waiting_ns": within(sets.waiting) if sets.joined else unknown,
        "transfer_ns": within(sets.transfer) if sets.joined else unknown,
        "sync_ns": within(sets.sync) if sets.joined and computes else unknown,
        "blocked_ns": within(activity.blocked),
        "data_ns": within(activity.data),
        "update_ns": within(activity.update),
        "update_alone_ns": within(sets.update_alone),
        "host_ns": wall - within(sets.busy_host) if computes else unknown,
        "stopped_ns": within(activity.stopped),
        "exposed_wait_ns": within(sets.exposed_waiting) if sets.joined and computes else unknown,
        "exposed_transfer_ns": (
            within(sets.exposed_transfer) if sets.joined and computes else unknown
        ),
        **{name: part if computes else unknown for name, part in causes.items()},
        "idle_unknown_ns": idle - sum(causes.values()),
        "idle_in_phase_ns": within(sets.idle_in_phase),
        "launch_gap_ns": within(sets.launch_gaps),
    }


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None where either is unknown or there is no whole."""
    return part / whole if whole > 0 and not np.isnan(part) else None
