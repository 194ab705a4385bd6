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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    FloatArray,
    IntArray,
    by_place,
    distinct,
    places_by_value,
)
from ddltrace.analyzer.events.interval_sets import EMPTY, lengths_within
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.collectives import bus_factor
from ddltrace.analyzer.measures.distribution import merged_records, round_values
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, merged_by
from ddltrace.tracer.trace.schema import OPS

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


@dataclass(frozen=True)
class SizePoint:
    """One point of a fit: the collectives of one size.

    Attributes:
        bytes: Size of the whole vector, the n of `CostFit`.
        transfer_us: Median of their transfers.
        samples: Number of collectives.
    """

    bytes: int
    transfer_us: float
    samples: int


@dataclass(frozen=True)
class CostFit:
    """Time against size of one operation: transfer = latency + n / bandwidth.

    Attributes:
        op: Operation.
        group_size: Ranks that take part.
        backend: Backend of the group; empty if the trace does not contain it.
        samples: Number of collectives that the fit uses.
        sizes: Number of different sizes among these collectives.
        latency_us: Time of an empty collective; None if there is no fit, see `verdict`.
        alpha_us: Latency of one message of the collective if it runs as a ring.
        algbw_gbps: Algorithm bandwidth for large sizes, gigabits per second.
        busbw_gbps: The same as bus bandwidth.
        error: Median over sizes of |fit - measured| / measured.
        disturbed: Whether some of the samples overlapped compute, which slows them.
        verdict: ``fitted``, or why there is no fit.
        points: The fitted points, by size; only the most frequent sizes if there are very many.
        src: For sends and receives (`op` is ``send``): the sending rank of one link; None for
            all links together, and for collectives.
        dst: The receiving rank.
    """

    op: str
    group_size: int
    backend: str
    samples: int
    sizes: int
    latency_us: float | None
    alpha_us: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    error: float | None
    disturbed: bool
    verdict: str
    points: tuple[SizePoint, ...] = ()
    src: int | None = None
    dst: int | None = None

    @property
    def title(self) -> str:
        """A title for the fit: ``all_reduce of 4``, ``send 0 -> 1``."""
        if self.src is not None:
            return f"{self.op} {self.src} -> {self.dst}"
        return f"{self.op}, all links" if self.op == "send" else f"{self.op} of {self.group_size}"


@dataclass(frozen=True)
class SizeBin:
    """Messages of one operation with `bytes_from` <= size < `bytes_below`; see `CollectiveRow`.

    Attributes:
        op: Operation.
        bytes_from: Smallest size of the bin.
        bytes_below: Upper limit of the bin, exclusive.
        count: Messages.
        bytes: Sum of their sizes.
    """

    op: str
    bytes_from: int
    bytes_below: int
    count: int
    bytes: int


class FitKind(NamedTuple):
    """The messages of one fit.

    Attributes:
        op: Operation; ``send`` for sends and receives.
        ranks: Ranks that take part.
        backend: Backend of the group; empty if the trace does not contain it.
        src: The sending rank of one link; None for all links together, and for collectives.
        dst: The receiving rank.
    """

    op: str
    ranks: int
    backend: str
    src: int | None = None
    dst: int | None = None


@dataclass(frozen=True)
class FitSamples:
    """Sizes and times of the messages of one fit.

    Attributes:
        size: Bytes of each; without messages that share the link with others.
        us: Its transfer.
        quiet: Whether it is hardly overlapped by compute.
        count: How many messages have these values; None for one each.
        shared: Number of messages that share the link with others.
    """

    size: IntArray
    us: FloatArray
    quiet: BoolArray
    count: IntArray | None
    shared: int

    def rounded(self) -> FitSamples:
        """The same with times rounded as in `Distribution.rounded`, and equal messages counted."""
        return self if self.count is not None else FitSamples.merged([self, _NO_SAMPLES])

    @staticmethod
    def merged(parts: Sequence[FitSamples]) -> FitSamples:
        """All messages of some parts, with rounded times if there is more than one part."""
        if len(parts) == 1:
            return parts[0]
        size, us = (np.concatenate([getattr(part, name) for part in parts]) for name in _VALUES)
        quiet = np.concatenate([part.quiet for part in parts])
        count = np.concatenate([part.counts for part in parts])
        us = round_values(us)
        order = np.lexsort((us, quiet, size))
        size, us, quiet, count = size[order], us[order], quiet[order], count[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(size) != 0) | (np.diff(us) != 0) | (quiet[1:] != quiet[:-1])
        first = np.flatnonzero(new)
        sums = np.add.reduceat(count, first) if len(first) else count
        shared = sum(part.shared for part in parts)
        return FitSamples(size[first], us[first], quiet[first], sums, shared)

    @property
    def counts(self) -> IntArray:
        """How many messages each entry stands for."""
        return np.ones(len(self.size), np.int64) if self.count is None else self.count

    @property
    def used(self) -> FitSamples:
        """The messages that a fit uses: the quiet ones if they suffice, else all."""
        rows = self.quiet
        if not _tells(self.size[rows]):
            return self
        values = (self.size[rows], self.us[rows], self.quiet[rows], self.counts[rows])
        return FitSamples(*values, self.shared)


_VALUES: Final = ("size", "us")
_NO_SAMPLES: Final = FitSamples(
    np.empty(0, np.int64), np.empty(0), np.empty(0, bool), np.empty(0, np.int64), 0
)


def collective_samples(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, chosen: BoolArray
) -> dict[FitKind, FitSamples]:
    """Collects sizes and transfers of collectives by operation, number of ranks and backend.

    Args:
        trace: The source of the groups' backends.
        joined: All messages.
        chosen: Which collectives are in the analyzed window.
    """
    collectives, messages = joined.collectives, joined.messages
    transfer = collectives.end - collectives.last
    usable = chosen & collectives.timed & (collectives.ranks > 1)
    index = np.flatnonzero(usable & (collectives.size > 0) & (transfer > 0))
    disturbance = _disturbance(scans, joined)[index]
    backends = [trace.group_backend(name) for name in messages.groups]
    names = sorted(set(backends))
    backend = np.array([names.index(name) for name in backends], dtype=np.int64)
    group = collectives.group[index]
    keys = np.stack([collectives.op[index], messages.group_size[group], backend[group]])
    kinds, which = np.unique(keys, axis=1, return_inverse=True)
    size, us = collectives.size[index], transfer[index] / 1e3
    of_kind = [places for _, places in places_by_value(which)]
    return {
        FitKind(messages.ops[op], ranks, names[backend_code]): _samples(
            places, size, us, disturbance
        )
        for places, (op, ranks, backend_code) in zip(of_kind, kinds.T.tolist(), strict=True)
    }


def link_samples(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, chosen: BoolArray
) -> dict[FitKind, FitSamples]:
    """Collects sizes and transfers of sends and receives: over all links, and of the most used.

    The transfer of a message is the end of its receive minus the later of both starts.

    Args:
        trace: The source of the groups' backends.
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
        return {}
    end, src, dst = messages.end[rows], messages.peer[rows], messages.rank[rows]
    links, which = np.unique(np.stack([src, dst]), axis=1, return_inverse=True)
    beside = np.zeros(len(rows))
    for rank, mine in places_by_value(dst):
        compute = scans[rank].activity.compute
        within = lengths_within(EMPTY if compute is None else compute, begin[mine], end[mine])
        beside[mine] = within / (end[mine] - begin[mine])
    of_link = by_place(which, links.shape[1])
    for mine in of_link:
        shared = _shares_the_link(begin[mine], end[mine])
        beside[mine[shared]] = _SHARED
    us = (end - begin) / 1e3

    def kind(everything: IntArray) -> FitKind:
        group = messages.groups[messages.group[rows[everything[0]]]]
        return FitKind("send", 2, trace.group_backend(group))

    everything = np.arange(len(rows))
    found = {kind(everything): _samples(everything, size, us, beside)}
    busiest = sorted(range(len(of_link)), key=lambda i: -len(of_link[i]))[:_MAX_LINKS]
    for i in busiest:
        one = kind(of_link[i])._replace(src=int(links[0, i]), dst=int(links[1, i]))
        found[one] = _samples(of_link[i], size, us, beside)
    return found


def _samples(rows: IntArray, size: IntArray, us: FloatArray, disturbance: FloatArray) -> FitSamples:
    """The samples of some messages."""
    mine = rows[disturbance[rows] < _SHARED]
    quiet = disturbance[mine] <= _MAX_OVERLAP
    return FitSamples(size[mine], us[mine], quiet, None, len(rows) - len(mine))


def cost_fits(samples: Mapping[FitKind, FitSamples]) -> tuple[CostFit, ...]:
    """Fits of collectives, the most frequent first; then of sends and receives.

    Those begin with all links together, then come single links, the most used first.

    Args:
        samples: See `collective_samples` and `link_samples`.
    """

    def used(kind: FitKind) -> int:
        return int(samples[kind].counts.sum()) + samples[kind].shared

    links = sorted((kind for kind in samples if kind.src is not None), key=used, reverse=True)
    of_collectives = [_fit(kind, each) for kind, each in samples.items() if kind.op != "send"]
    of_all_links = [kind for kind in samples if kind.op == "send" and kind.src is None]
    return (
        *sorted(of_collectives, key=lambda fit: -fit.samples),
        *(_fit(kind, samples[kind]) for kind in (*of_all_links, *links[:_MAX_LINKS])),
    )


def _fit(kind: FitKind, everything: FitSamples) -> CostFit:
    samples = everything.used
    sizes, medians, counts = _medians(samples)
    op, ranks = kind.op, kind.ranks
    latency = bandwidth = alpha = error = None
    verdict = f"too few sizes ({len(sizes)}) to tell latency from bandwidth"
    if samples.shared and not _tells(samples.size):
        verdict = "most messages share the link with others, so the time of one alone is not known"
    if _tells(samples.size):
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
        backend=kind.backend,
        samples=int(samples.counts.sum()),
        sizes=len(sizes),
        latency_us=latency,
        alpha_us=alpha,
        algbw_gbps=bandwidth,
        busbw_gbps=None if bandwidth is None else bandwidth * bus_factor(op, ranks),
        error=error,
        disturbed=not bool(samples.quiet.all()),
        verdict=verdict,
        points=tuple(
            SizePoint(bytes=int(n), transfer_us=median, samples=count)
            for n, median, count in zip(
                sizes.tolist(), medians.tolist(), counts.tolist(), strict=True
            )
        ),
        src=kind.src,
        dst=kind.dst,
    )


def _tells(size: IntArray) -> bool:
    """Whether the sizes suffice to separate latency from bandwidth."""
    sizes = distinct(size)
    return len(sizes) >= _MIN_SIZES and bool(sizes[-1] >= _MIN_SPREAD * sizes[0])


def _medians(samples: FitSamples) -> tuple[FloatArray, FloatArray, IntArray]:
    """Sizes that occur, ascending, the median time of each, and how often it occurs."""
    order = np.lexsort((samples.us, samples.size))
    size, us, count = samples.size[order], samples.us[order], samples.counts[order]
    ends = np.cumsum(count)
    sizes, first = np.unique(size, return_index=True)
    begins = ends[first] - count[first]
    counts = np.diff(np.append(begins, ends[-1:]))
    low = np.searchsorted(ends, begins + (counts - 1) // 2, side="right")
    high = np.searchsorted(ends, begins + counts // 2, side="right")
    medians = (us[low] + us[high]) / 2
    if len(sizes) > _MAX_SIZES:
        kept = np.sort(np.argsort(-counts, kind="stable")[:_MAX_SIZES])
        sizes, medians, counts = sizes[kept], medians[kept], counts[kept]
    return sizes.astype(np.float64), medians, counts


def _disturbance(scans: Mapping[int, RankScan], joined: Joined) -> FloatArray:
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


def _sizes(steps: JoinedSteps) -> tuple[SizeBin, ...]:
    """Messages by operation and size in powers of two.

    A collective counts once; of a send and its receive only the send counts.
    """
    joined, chosen = steps.joined, steps.chosen_messages
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


def _fit_samples(joined: JoinedSteps) -> dict[FitKind, FitSamples]:
    of = joined.trace, joined.scans, joined.joined
    found = collective_samples(*of, joined.chosen_collectives) | link_samples(
        *of, joined.chosen_messages
    )
    return {kind: each.rounded() for kind, each in found.items()} if joined.in_ranges else found


def _both_sizes(former: tuple[SizeBin, ...], later: tuple[SizeBin, ...]) -> tuple[SizeBin, ...]:
    sums: dict[tuple[str, int, int], tuple[int, int]] = {}
    for row in (*former, *later):
        key = row.op, row.bytes_from, row.bytes_below
        count, size = sums.get(key, (0, 0))
        sums[key] = count + row.count, size + row.bytes
    return tuple(SizeBin(*key, *values) for key, values in sorted(sums.items(), key=_by_op))


def _by_op(item: tuple[tuple[str, int, int], Any]) -> tuple[int, str, int]:
    """Sorts by operation, in the order of `OPS`, then by size."""
    op, low, _ = item[0]
    return OPS.index(op) if op in OPS else len(OPS), op, low


COST_FITS: Final[Measure[dict[FitKind, FitSamples], tuple[CostFit, ...]]] = Measure(
    "cost_fits",
    lambda whole: cost_fits(whole.found.of(COST_FITS)),
    _fit_samples,
    merged_by(lambda former, later: merged_records(former, later, FitSamples.merged)),
)
MESSAGE_SIZES: Final[Measure[tuple[SizeBin, ...], tuple[SizeBin, ...]]] = Measure(
    "message_sizes", lambda whole: whole.found.of(MESSAGE_SIZES), _sizes, merged_by(_both_sizes)
)
