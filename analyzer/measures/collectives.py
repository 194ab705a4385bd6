"""Rows of collectives by operation, group and size, and of sends by pair of ranks.

`ddltrace.analyzer.model.CollectiveRow` and `P2PRow` define the formulas.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, BoolArray, IntArray
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.model import CollectiveRow, Joining, P2PRow

_BITS_PER_BYTE: Final = 8
_SPREAD: Final = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations in which (p - 1) / p of the whole vector cross each rank's link."""


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, after NVIDIA's nccl-tests (PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _SPREAD else 1.0


def collective_rows(
    joined: Joined, chosen: IntArray, residual_ns: float | None
) -> tuple[CollectiveRow, ...]:
    """One row per operation, group and size, those with the longest transfer first.

    Args:
        joined: All messages.
        chosen: Which collectives are in the analyzed window.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """
    collectives = joined.collectives
    index = np.flatnonzero(chosen & (collectives.state != State.MISMATCH))
    if not len(index):
        return ()
    op, group, size = collectives.op[index], collectives.group[index], collectives.bytes[index]
    order = np.lexsort((size, group, op))
    index, op, group, size = index[order], op[order], group[order], size[order]
    new = np.flatnonzero(
        np.append(True, (np.diff(op) != 0) | (np.diff(group) != 0) | (np.diff(size) != 0))
    )
    rows = [
        _collective_row(joined, index[begin:end], residual_ns)
        for begin, end in zip(new, np.append(new[1:], len(index)), strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: -(row.transfer_us_total or 0.0)))


def _collective_row(joined: Joined, index: IntArray, residual_ns: float | None) -> CollectiveRow:
    collectives, first = joined.collectives, index[0]
    op = joined.messages.ops[collectives.op[first]]
    group = int(collectives.group[first])
    ranks = int(joined.messages.group_size[group])
    size = int(collectives.bytes[first])
    done = index[collectives.timed[index]]
    transfer = np.maximum(collectives.end[done] - collectives.last[done], 0) / 1e3
    wait = collectives.wait[done] / 1e3
    skew = (collectives.last[done] - collectives.first[done]) / 1e3
    vector = collectives.size[done]
    timed = (transfer > 0) & (vector > 0)
    gbps = vector[timed] * _BITS_PER_BYTE / (transfer[timed] * 1e3)
    algbw = float(np.median(gbps)) if timed.any() else None
    measured = len(done) > 0
    unsure = residual_ns is None or (
        measured and residual_ns > 0 and float(np.median(transfer)) * 1e3 < residual_ns
    )
    return CollectiveRow(
        op=op,
        group=joined.messages.groups[group],
        group_size=ranks,
        count=len(index),
        bytes=None if size == NULL else size,
        algbw_gbps=algbw,
        busbw_gbps=None if algbw is None else algbw * bus_factor(op, ranks),
        wait_us=float(np.median(wait / collectives.ranks[done])) if measured else None,
        transfer_us=float(np.median(transfer)) if measured else None,
        transfer_us_p95=float(np.percentile(transfer, 95)) if measured else None,
        arrival_skew_us=float(np.median(skew)) if measured else None,
        wait_us_total=float(wait.sum()) if measured else None,
        transfer_us_total=float(transfer.sum()) if measured else None,
        incomplete=len(index) - len(done),
        unsure=bool(unsure),
    )


def p2p_rows(joined: Joined, chosen: IntArray, residual_ns: float | None) -> tuple[P2PRow, ...]:
    """One row per pair of ranks, the largest first.

    Args:
        joined: All messages.
        chosen: Which messages are in the analyzed window.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """
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
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(pairs.shape[1] + 1))
    found = []
    for i, (src, dst) in enumerate(pairs.T.tolist()):
        places = order[bounds[i] : bounds[i + 1]]
        mine = rows[places]
        kept = matched[mine] & (wait[mine] != NULL)
        timed, took = mine[kept], transfer[mine[kept]]
        moved = (took > 0) & (size[places[kept]] > 0)
        gbps = size[places[kept]][moved] * _BITS_PER_BYTE / took[moved]
        median = float(np.median(took)) if len(took) else None
        sizes = size[places][size[places] != NULL]
        unsure = residual_ns is None or (median is not None and 0 < residual_ns > median)
        found.append(
            P2PRow(
                src=src,
                dst=dst,
                count=len(mine),
                bytes=int(sizes.sum()) if len(sizes) else None,
                wait_us=float(wait[timed].sum() / 1e3) if len(timed) else None,
                transfer_us=float(took.sum() / 1e3) if len(timed) else None,
                unmatched=int((~matched[mine]).sum()),
                transfer_us_p50=None if median is None else median / 1e3,
                transfer_us_p95=float(np.percentile(took, 95)) / 1e3 if len(took) else None,
                algbw_gbps=float(np.median(gbps)) if len(gbps) else None,
                unsure=bool(unsure),
            )
        )
    return tuple(sorted(found, key=lambda row: -(row.bytes or 0)))


def joining(joined: Joined, chosen: BoolArray, chosen_messages: BoolArray) -> Joining:
    """How well messages could be joined across ranks.

    Args:
        joined: All messages.
        chosen: The collectives to count.
        chosen_messages: The sends and receives to count.
    """
    state = joined.collectives.state[chosen]
    p2p = joined.messages.is_p2p & chosen_messages
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


def in_steps(step: IntArray, numbers: IntArray) -> IntArray:
    """Whether each step number is among the given, ascending steps."""
    return np.asarray(place_in(step, numbers) != NULL)


def place_in(step: IntArray, numbers: IntArray) -> IntArray:
    """Returns the index of each step number in the given, ascending steps, or `NULL`."""
    if not len(numbers):
        return np.full(len(step), NULL)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1:  # the usual case: none is left out
        return np.where((step >= first) & (step <= last), step - first, NULL)
    place = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    return np.where(numbers[place] == step, place, NULL)
