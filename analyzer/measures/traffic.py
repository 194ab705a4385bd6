"""The communication pattern: bytes sent from each rank to each other rank.

The bytes of sends and receives are known, and those of all-to-alls whose calls gave the sizes for
each rank. For other collectives, the trace does not contain the bytes between pairs of ranks, so
they are computed for the common algorithm, and the rows are marked:

- all_reduce: a ring; each member sends 2 (p - 1) / p n to the next one;
- all_gather, reduce_scatter: a ring; (p - 1) / p n to the next one (n the whole vector);
- broadcast, scatter: from the root to each; reduce, gather: from each to the root;
- all_to_all: n / p from each to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, BoolArray, IntArray, distinct
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.all_to_all import MAX_PAIRWISE, sent_between
from ddltrace.analyzer.measures.collectives import LinkTimes, find_links
from ddltrace.analyzer.measures.measure import Measure, merged_by

_MAX_ROWS: Final = 4096


@dataclass(frozen=True)
class TrafficRow:
    """Bytes from one rank to another.

    Attributes:
        src: Sending rank.
        dst: Receiving rank.
        bytes: How many.
        assumed: None where it was measured (sends, receives, and all-to-alls whose calls gave the
            sizes for each rank); else how the bytes of collectives were laid out: ``ring``,
            ``root`` or ``pairwise``.
    """

    src: int
    dst: int
    bytes: int
    assumed: str | None


def traffic_rows(
    joined: Joined, links: Mapping[tuple[int, int], LinkTimes], chosen: BoolArray
) -> tuple[TrafficRow, ...]:
    """One row per pair of ranks and way of knowing, the largest first, at most 4,096.

    Args:
        joined: All messages.
        links: The measured sends and receives.
        chosen: Which collectives are in the analyzed window.
    """
    sums: dict[tuple[int, int, str | None], float] = {
        (src, dst, None): link.bytes for (src, dst), link in links.items() if link.sized
    }
    unknown = chosen.copy()
    for sent in sent_between(joined, chosen):
        unknown &= ~sent.collectives
        between = np.where(np.eye(len(sent.ranks), dtype=bool), 0, sent.bytes)
        for src, dst in np.argwhere(between > 0).tolist():
            pair = (sent.ranks[src], sent.ranks[dst], None)
            sums[pair] = sums.get(pair, 0.0) + float(between[src, dst])
    for src, dst, size, how in _assumed(joined, unknown):
        sums[src, dst, how] = sums.get((src, dst, how), 0.0) + size
    return largest_rows(
        TrafficRow(src=src, dst=dst, bytes=round(size), assumed=how)
        for (src, dst, how), size in sums.items()
    )


def largest_rows(rows: Iterable[TrafficRow]) -> tuple[TrafficRow, ...]:
    """The largest rows, in order."""
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:_MAX_ROWS])


def _assumed(joined: Joined, chosen: BoolArray) -> Iterator[tuple[int, int, float, str]]:
    collectives, messages = joined.collectives, joined.messages
    usable = chosen & (collectives.state == State.COMPLETE) & (collectives.size > 0)
    index = np.flatnonzero(usable)
    root = messages.peer[joined.order[collectives.first_row]][index]
    keys = np.stack([collectives.op[index], collectives.group[index], root])
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    totals = np.bincount(which, weights=collectives.size[index], minlength=kinds.shape[1])
    for (op, group, peer), total in zip(kinds.T.tolist(), totals.tolist(), strict=True):
        members = messages.members[group] or _seen(joined, group)
        yield from _spread(messages.ops[op], members, peer, total)


def _spread(
    op: str, members: tuple[int, ...], root: int, size: float
) -> Iterator[tuple[int, int, float, str]]:
    count = len(members)
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(op)
    if count < 2:
        return
    if rounds is not None:
        for i, rank in enumerate(members):
            share = rounds * (count - 1) / count * size
            yield rank, members[(i + 1) % count], share, "ring"
    elif op in ("broadcast", "scatter", "reduce", "gather") and root != NULL:
        part = size if op in ("broadcast", "reduce") else size / count
        for rank in members:
            if rank != root and op in ("broadcast", "scatter"):
                yield root, rank, part, "root"
            elif rank != root:
                yield rank, root, part, "root"
    elif op == "all_to_all" and count <= MAX_PAIRWISE:
        for src in members:
            for dst in members:
                if src != dst:
                    yield src, dst, size / count, "pairwise"


def _seen(joined: Joined, group: int) -> tuple[int, ...]:
    ranks: IntArray = joined.messages.rank[joined.messages.group == group]
    return tuple(distinct(ranks).tolist())


def _both(former: tuple[TrafficRow, ...], later: tuple[TrafficRow, ...]) -> tuple[TrafficRow, ...]:
    sums: dict[tuple[int, int, str | None], int] = {}
    for row in (*former, *later):
        key = row.src, row.dst, row.assumed
        sums[key] = sums.get(key, 0) + row.bytes
    return tuple(TrafficRow(src, dst, size, how) for (src, dst, how), size in sums.items())


TRAFFIC: Final[Measure[tuple[TrafficRow, ...], tuple[TrafficRow, ...]]] = Measure(
    "traffic",
    lambda whole: largest_rows(whole.found.of(TRAFFIC)),
    lambda joined: traffic_rows(joined.joined, joined.once(find_links), joined.chosen_collectives),
    merged_by(_both),
)
