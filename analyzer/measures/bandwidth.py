"""Time against size: latency and bandwidth fitted per operation, and the distribution of sizes.

Model (Hockney): transfer = latency + n / bandwidth, n the size of the whole vector. For a ring
of p ranks the latency is made of 2 (p - 1) messages for an all_reduce and of p - 1 for an
all_gather or reduce_scatter, each costing alpha.

The transfer of a collective is its last end minus its last arrival. Collectives whose transfer
overlaps compute are excluded if enough others remain, because the two slow each other down.
Collectives that overlap another message are always excluded, because they share the bandwidth. The
median of each size enters a Theil-Sen fit (median of all slopes between sizes), which is robust
against outliers among the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, BoolArray, IntArray
from ddltrace.analyzer.events.interval_sets import EMPTY, lengths_within
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.collectives import bus_factor
from ddltrace.analyzer.model import CostFit, SizeBin, SizePoint

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_MIN_SIZES: Final = 4
_MIN_SPREAD: Final = 4
_MAX_SIZES: Final = 500
"""Maximum number of sizes, since all pairs are compared; only the most frequent ones are used."""

_MAX_LINKS: Final = 256
_MAX_OVERLAP: Final = 0.1
_SHARED: Final = 2.0
_ROUNDS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "send": 1}


def cost_fits(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, chosen: BoolArray
) -> tuple[CostFit, ...]:
    """One fit per operation, number of ranks and backend, the most frequent first.

    Args:
        trace: The source of the groups' backends.
        scans: Rank -> its scan.
        joined: All messages.
        chosen: Which collectives are in the analyzed window.
    """
    collectives, messages = joined.collectives, joined.messages
    transfer = collectives.end - collectives.last
    usable = chosen & collectives.timed & (collectives.ranks > 1)
    index = np.flatnonzero(usable & (collectives.size > 0) & (transfer > 0))
    disturbance = _disturbance(scans, joined)[index]
    alone = disturbance <= _MAX_OVERLAP
    backends = [trace.group_backend(name) for name in messages.groups]
    names = sorted(set(backends))
    backend = np.array([names.index(name) for name in backends], dtype=np.int64)
    group = collectives.group[index]
    keys = np.stack([collectives.op[index], messages.group_size[group], backend[group]])
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    fits = []
    for i, (op, ranks, backend_code) in enumerate(kinds.T.tolist()):
        everything = np.flatnonzero(which == i)
        mine = everything[disturbance[everything] < _SHARED]
        quiet = mine[alone[mine]]
        if _tells(collectives.size[index[quiet]]):
            mine = quiet
        size, us = collectives.size[index[mine]], transfer[index[mine]] / 1e3
        fits.append(
            _fit(
                messages.ops[op],
                ranks,
                names[backend_code],
                size,
                us,
                disturbed=not bool(alone[mine].all()),
                shared=len(everything) - len(mine),
            )
        )
    return tuple(sorted(fits, key=lambda fit: -fit.samples))


def link_fits(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, chosen: BoolArray
) -> tuple[CostFit, ...]:
    """Fits of sends and receives: one over all links, then one per link, the most used first.

    The transfer of a message is the end of its receive minus the later of both starts.

    Args:
        trace: The source of the groups' backends.
        scans: Rank -> its scan.
        joined: All messages.
        chosen: Which messages are in the analyzed window.
    """
    messages, partner = joined.messages, joined.partner
    rows = np.flatnonzero(
        chosen & messages.op_is("recv") & (partner != NULL) & (messages.end != NULL_NS)
    )
    size = np.maximum(messages.out_bytes[rows], messages.bytes[partner[rows]])
    begin = np.maximum(messages.start[rows], messages.start[partner[rows]])
    kept = (size > 0) & (messages.end[rows] > begin)
    rows, size, begin = rows[kept], size[kept].astype(np.int64), begin[kept]
    if not len(rows):
        return ()
    end, src, dst = messages.end[rows], messages.peer[rows], messages.rank[rows]
    links, which = np.unique(np.stack([src, dst]), axis=1, return_inverse=True)
    beside = np.zeros(len(rows))
    for rank in np.unique(dst).tolist():
        compute = scans[rank].activity.compute
        mine = np.flatnonzero(dst == rank)
        within = lengths_within(EMPTY if compute is None else compute, begin[mine], end[mine])
        beside[mine] = within / (end[mine] - begin[mine])
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(links.shape[1] + 1))
    of_link = [order[low:high] for low, high in pairwise(bounds)]
    for mine in of_link:
        shared = _shares_the_link(begin[mine], end[mine])
        beside[mine[shared]] = _SHARED
    us = (end - begin) / 1e3

    def fit(everything: IntArray) -> CostFit:
        mine = everything[beside[everything] < _SHARED]
        quiet = mine[beside[mine] <= _MAX_OVERLAP]
        if _tells(size[quiet]):
            mine = quiet
        group = messages.groups[messages.group[rows[everything[0]]]]
        return _fit(
            "send",
            2,
            trace.group_backend(group),
            size[mine],
            us[mine],
            disturbed=not bool((beside[mine] <= _MAX_OVERLAP).all()),
            shared=len(everything) - len(mine),
        )

    busiest = sorted(range(len(of_link)), key=lambda i: -len(of_link[i]))[:_MAX_LINKS]
    single = [replace(fit(of_link[i]), src=int(links[0, i]), dst=int(links[1, i])) for i in busiest]
    return (fit(np.arange(len(rows))), *single)


def _fit(
    op: str,
    ranks: int,
    backend: str,
    size: IntArray,
    us: npt.NDArray[np.float64],
    *,
    disturbed: bool,
    shared: int,
) -> CostFit:
    sizes, medians, counts = _medians(size, us)
    latency = bandwidth = alpha = error = None
    verdict = f"too few sizes ({len(sizes)}) to tell latency from bandwidth"
    if shared and not _tells(size):
        verdict = "most messages share the link with others: what one alone would take is not seen"
    if _tells(size):
        i, j = np.triu_indices(len(sizes), 1)
        slope = float(np.median((medians[j] - medians[i]) / (sizes[j] - sizes[i])))
        if slope <= 0:
            verdict = "time does not grow with size: latency only, or noise"
            latency = float(np.median(medians))
        else:
            latency = max(float(np.median(medians - slope * sizes)), 0.0)
            bandwidth = 8 / (slope * 1e3)
            verdict = "fitted"
            error = float(np.median(np.abs(latency + slope * sizes - medians) / medians))
        if op in _ROUNDS:
            alpha = latency / (_ROUNDS[op] * (ranks - 1))
    return CostFit(
        op=op,
        group_size=ranks,
        backend=backend,
        samples=len(size),
        sizes=len(sizes),
        latency_us=latency,
        alpha_us=alpha,
        algbw_gbps=bandwidth,
        busbw_gbps=None if bandwidth is None else bandwidth * bus_factor(op, ranks),
        error=error,
        disturbed=disturbed,
        verdict=verdict,
        points=tuple(
            SizePoint(bytes=int(n), transfer_us=median, samples=count)
            for n, median, count in zip(
                sizes.tolist(), medians.tolist(), counts.tolist(), strict=True
            )
        ),
    )


def _tells(size: IntArray) -> bool:
    """Whether the sizes suffice to separate latency from bandwidth."""
    sizes = np.unique(size)
    return len(sizes) >= _MIN_SIZES and bool(sizes[-1] >= _MIN_SPREAD * sizes[0])


def _medians(
    size: IntArray, us: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], IntArray]:
    """Sizes that occur, ascending, the median time of each, and how often it occurs."""
    order = np.lexsort((us, size))
    size, us = size[order], us[order]
    sizes, first, counts = np.unique(size, return_index=True, return_counts=True)
    medians = (us[first + (counts - 1) // 2] + us[first + counts // 2]) / 2
    if len(sizes) > _MAX_SIZES:
        kept = np.sort(np.argsort(-counts, kind="stable")[:_MAX_SIZES])
        sizes, medians, counts = sizes[kept], medians[kept], counts[kept]
    return sizes.astype(np.float64), medians, counts


def _disturbance(scans: Mapping[int, RankScan], joined: Joined) -> npt.NDArray[np.float64]:
    """How much of each collective's transfer runs beside compute: the most on any rank.

    `_SHARED` if another message is in flight at the same time.
    """
    collectives, messages = joined.collectives, joined.messages
    largest = np.zeros(len(collectives))
    for rank, scan in scans.items():
        rows = joined.rows(rank)
        of_row, end = joined.collective[rows], messages.end[rows]
        timed = np.flatnonzero((of_row != NULL) & (end != NULL_NS))
        of_row, end = of_row[timed], end[timed]
        begin = np.minimum(np.maximum(collectives.last[of_row], messages.start[rows][timed]), end)
        compute = EMPTY if scan.activity.compute is None else scan.activity.compute
        beside = lengths_within(compute, begin, end) / np.maximum(end - begin, 1)
        beside[_shares_the_link(begin, end)] = _SHARED
        np.maximum.at(largest, of_row, beside)
    return largest


def _shares_the_link(begin: IntArray, end: IntArray) -> BoolArray:
    """Whether each interval has instants in common with another one."""
    shares = np.zeros(len(begin), dtype=bool)
    order = np.lexsort((end, begin))
    begin, end = begin[order], end[order]
    before = np.maximum.accumulate(end)[:-1] > begin[1:]
    shares[order[1:]] = before
    shares[order[:-1]] |= begin[1:] < end[:-1]
    return shares


def size_bins(joined: Joined, chosen: BoolArray) -> tuple[SizeBin, ...]:
    """Messages by operation and size in powers of two.

    A collective counts once; of a send and its receive only the send counts.

    Args:
        joined: All messages.
        chosen: Which messages are in the analyzed window.
    """
    messages = joined.messages
    once = np.zeros(len(messages), dtype=bool)
    once[joined.order[joined.collectives.first_row]] = True
    once |= messages.op_is("send")
    rows = np.flatnonzero(once & chosen)
    size = messages.bytes[rows]
    of_collective = joined.collective[rows]
    in_collective = of_collective != NULL
    size = size.astype(np.int64)
    size[in_collective] = joined.collectives.bytes[of_collective[in_collective]]
    known = size >= 0
    rows, size = rows[known], size[known]
    power = np.where(size > 0, np.frexp(np.maximum(size, 1).astype(np.float64))[1] - 1, NULL)
    pairs, which = np.unique(np.stack([messages.op[rows], power]), axis=1, return_inverse=True)
    counts = np.bincount(which, minlength=pairs.shape[1])
    totals = np.bincount(which, weights=size, minlength=pairs.shape[1])
    return tuple(
        SizeBin(
            op=messages.ops[op],
            bytes_from=0 if exponent == NULL else 1 << exponent,
            bytes_below=1 if exponent == NULL else 1 << (exponent + 1),
            count=int(count),
            bytes=int(total),
        )
        for (op, exponent), count, total in zip(pairs.T.tolist(), counts, totals, strict=True)
    )
