"""Root causes of waiting by rank and activity, and the cost of each; see `joined/delays.py`.

A slow link makes its receiver wait during the transfer, although no rank arrives late. So for each
transfer between two ranks, the time beyond that of transfers of the same size on the other links of
the job counts in addition to the waiting that it causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    FloatArray,
    IntArray,
    distinct,
)
from ddltrace.analyzer.events.interval_sets import (
    Spans,
    divided_at,
    intersect,
    length_before,
    lengths_within,
    overlaps,
    union,
)
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.events.rank_timeline import CATEGORY
from ddltrace.analyzer.joined.delays import CAUSES, find_delays
from ddltrace.analyzer.joined.dependencies import Graph
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.joined.replay import Scenario
from ddltrace.analyzer.measures.keyed_sums import KeyedSums, RowSums, SavingSums
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, derived
from ddltrace.analyzer.measures.savings import SavingsFinder, find_savings
from ddltrace.analyzer.measures.steps import Steps

_TRANSFER: Final = CAUSES.index("transfer")
_MOST_OF_IT: Final = 0.5
_SAME: Final = 0.05
"""Two values of a saving that differ by less of the larger one count as one."""

_REPLAYED: Final = 16
"""Number of causes, the most expensive ones, that are named and replayed."""


@dataclass(frozen=True)
class RankWaiting:
    """Waiting of one rank, and waiting that began on it.

    Attributes:
        rank: Global rank.
        waits_us: How long it is blocked on messages that another rank has not yet entered.
        causes_us: Waiting of all ranks that began on this rank: the direct and propagated waiting
            of its root causes.
    """

    rank: int
    waits_us: float
    causes_us: float


@dataclass(frozen=True)
class Waiting:
    """Time in which ranks are blocked on messages that another rank has not yet entered.

    All are sums over ranks, means per steady step; without steps, of the whole trace.

    Attributes:
        total_us: All waiting: the sum of `waits_us`, and of `causes_us`, over ranks.
        p2p_us: The part of it at sends and receives.
        unknown_us: Additional time in which ranks are blocked on messages whose missing rank is
            unknown.
        ranks: By rank.
    """

    total_us: float
    p2p_us: float
    unknown_us: float
    ranks: tuple[RankWaiting, ...]

    @property
    def is_point_to_point(self) -> bool:
        """Whether most waiting is at sends and receives."""
        return self.p2p_us > self.total_us / 2


@dataclass(frozen=True)
class RootCause:
    """A root cause of waiting: an activity that took a rank longer than the ranks that waited for
    it.

    When a rank waits for another, both have worked since their last common message. The waiting is
    attributed, in proportion, to the activities (compute, update, data, copy, host code, transfers)
    on which the other rank spent more time in this period. If the other rank waited longer itself,
    that part is attributed to the causes of its waiting (delay propagation, as in Scalasca's
    root-cause analysis). All times are sums over ranks, means per steady step; without steps, of
    the whole trace.

    Attributes:
        rank: The rank on which the waiting began.
        activity: ``compute``, ``update``, ``data``, ``copy``, ``host``, or ``transfer``: a message
            to that rank took longer; ``unrecorded`` where the trace records nothing of the host:
            that rank may have worked then, or waited; ``stopped`` where no thread of its process
            ran.
        peer: The sending rank, for a transfer between two ranks; else None.
        name: Layer, operation or kernel with the largest extra time compared with other ranks; None
            without a name, for transfers and for small causes.
        direct_us: Waiting of ranks that waited for this rank.
        propagated_us: Waiting of ranks that waited for those.
        slower_us: For a transfer between two ranks: how much longer blocked receives took than is
            usual for their size on other links. This time is not waiting for a rank.
        share: Share of all waiting, direct and propagated.
        saves_us: Upper bound on the savings per step without the excess time, as in `Savings`: if
            the rank took no longer for the activity in each step than the fastest rank; if this
            explains little, if it took no longer than the ranks that wait for it; for a transfer,
            if it took the usual time. None for small causes, without steps, and if only a range is
            known.
        saves_range_us: Smallest and largest possible value of `saves_us` if they differ by more
            than 5 %: unexplained time (unrecorded time, and waiting for messages that could not be
            joined) counts as work for one and as waiting for the other. None if that time makes no
            difference.
    """

    rank: int
    activity: str
    peer: int | None
    name: str | None
    direct_us: float
    propagated_us: float
    slower_us: float
    share: float
    saves_us: float | None
    saves_range_us: tuple[float, float] | None = None

    @property
    def cost_us(self) -> float:
        """Its total cost."""
        return self.direct_us + self.propagated_us + self.slower_us

    @property
    def most_us(self) -> float:
        """The most that is known to be saved without it; 0 where nothing is known."""
        if self.saves_range_us is not None:
            return self.saves_range_us[1]
        return self.saves_us or 0.0


@dataclass(frozen=True)
class _Sums:
    """The cost of each cause, by rank, activity and peer of the link.

    Attributes:
        rank: The rank.
        cause: Index in `CAUSES`.
        peer: The other side; `NULL` for none.
        direct: Waiting that it causes itself, ns.
        propagated: Waiting that comes to others through those.
        slower: Transfer beyond what is usual.
    """

    rank: IntArray
    cause: IntArray
    peer: IntArray
    direct: FloatArray
    propagated: FloatArray
    slower: FloatArray


class RootCauseFinder:
    """Attributes the waiting of a run to its root causes.

    The steady steps count, or all of the trace where there are none.
    """

    def __init__(self, joined: JoinedSteps) -> None:
        scans, graph, steady = joined.scans, joined.graph, joined.steady
        self._scans, self._joined, self._graph = scans, joined.joined, graph
        self._work = joined.work
        self._numbers = distinct(
            np.concatenate([np.empty(0, np.int64), *(scan.step for scan in scans.values())])
        )
        self._least_of: dict[int, IntArray] = {}
        self._spent_of: dict[tuple[int, str], dict[str | None, float]] = {}
        self._steps = max(len(steady), 1)
        self._windows = _steady_windows(scans, steady)
        self._counted = _counted(graph, self._windows, everything=not len(steady))
        self._delays = find_delays(graph, self._joined, self._work, self._counted)
        self._slower = _slower_transfers(self._joined)
        self._sums = self._sum_up()

    def waiting(self) -> Waiting:
        """How long ranks wait, and for whom."""
        blocks, delays = self._graph.blocks, self._delays
        released = np.append(self._joined.released, NULL_NS)[blocks.message]
        unknown = self._counted & ((blocks.message == NULL) | (released == NULL_NS))
        place = np.searchsorted(blocks.ranks, delays.rank)
        waits = np.bincount(place, weights=delays.waiting, minlength=len(blocks.ranks))
        caused = np.zeros(len(blocks.ranks))
        sums = self._sums
        np.add.at(caused, np.searchsorted(blocks.ranks, sums.rank), sums.direct + sums.propagated)
        return Waiting(
            total_us=self._us(float(delays.waiting.sum())),
            p2p_us=self._us(float(delays.waiting[self._is_p2p()].sum())),
            unknown_us=self._us(float((blocks.end - blocks.start)[unknown].sum())),
            ranks=tuple(
                RankWaiting(rank=rank, waits_us=self._us(own), causes_us=self._us(of))
                for rank, own, of in zip(blocks.ranks, waits.tolist(), caused.tolist(), strict=True)
            ),
        )

    def causes(self, finder: SavingsFinder | None) -> tuple[RootCause, ...]:
        """Returns the causes, most expensive first.

        Args:
            finder: Replays the steps without a cause; None without steps.
        """
        sums = self._sums
        cost = sums.direct + sums.propagated + sums.slower
        order = np.argsort(-cost, kind="stable")
        order = order[cost[order] > 0]
        saved: list[tuple[float, float] | None] = [None] * len(order)
        if finder is not None:
            chosen = order[:_REPLAYED].tolist()
            found = finder.ranges(
                make(index) for make in (self._without, self._as_others) for index in chosen
            )
            pairs = zip(found[: len(chosen)], found[len(chosen) :], strict=True)
            for index, (waited_for, whole) in enumerate(pairs):
                low, high = whole if whole[1] > _MOST_OF_IT * waited_for[1] else waited_for
                ranks = (int(sums.rank[chosen[index]]),)
                saved[index] = (
                    finder.within_processors(low, ranks),
                    finder.within_processors(high, ranks),
                )
        names = self._names(order[:_REPLAYED])
        total = float(self._delays.waiting.sum())
        rows = []
        for index, saves in zip(order.tolist(), saved, strict=True):
            rank, activity = int(sums.rank[index]), CAUSES[sums.cause[index]]
            peer = int(sums.peer[index])
            own = float(sums.direct[index] + sums.propagated[index])
            known, between = known_or_range(saves)
            rows.append(
                RootCause(
                    rank=rank,
                    activity=activity,
                    peer=None if peer == NULL else peer,
                    name=names.get(index),
                    direct_us=self._us(float(sums.direct[index])),
                    propagated_us=self._us(float(sums.propagated[index])),
                    slower_us=self._us(float(sums.slower[index])),
                    share=own / total if total else 0.0,
                    saves_us=known,
                    saves_range_us=between,
                )
            )
        return tuple(rows)

    def _is_p2p(self) -> BoolArray:
        """Whether each wait is at a send or receive."""
        row = self._graph.blocks.message[self._delays.block]
        return np.asarray(self._joined.messages.is_p2p[row])

    def _names(self, chosen: IntArray) -> dict[int, str]:
        """Returns the names of causes' activities: those that took longer than on the other ranks.

        That is the name in which it spent most more than the median of those ranks that have it;
        of a name that no other rank has, all counts.
        """
        found: dict[int, str] = {}
        for cause in distinct(self._sums.cause[chosen]).tolist():
            if CAUSES[cause] not in CATEGORY or cause == _TRANSFER:
                continue
            spent = {
                rank: self._spent(rank, CAUSES[cause])
                for rank, scan in self._scans.items()
                if scan.timeline is not None
            }
            for index in chosen[self._sums.cause[chosen] == cause].tolist():
                own = spent.get(int(self._sums.rank[index]), {})
                others = [times for times in spent.values() if times is not own]
                more = {}
                for name, time in own.items():
                    if name is None:
                        continue
                    theirs = [times[name] for times in others if name in times]
                    more[name] = time - (float(np.median(theirs)) if theirs else 0.0)
                if more:
                    found[index] = max(more, key=lambda name: more[name])
        return found

    def _us(self, ns: float) -> float:
        return ns / 1e3 / self._steps

    def _sum_up(self) -> _Sums:
        delays, blocks = self._delays, self._graph.blocks
        causes = len(CAUSES)
        ranks = np.repeat(delays.cause_rank, causes)
        cause = np.tile(np.arange(causes), len(delays))
        peer = np.where(cause == _TRANSFER, np.repeat(delays.link, causes), NULL)
        # Slower transfers that ranks are blocked on.
        row = blocks.message
        held = self._counted & (row != NULL)
        late = np.append(self._slower, 0)[row]
        released = np.append(self._joined.released, NULL_NS)[row]
        moving = blocks.end - np.clip(released, blocks.start, blocks.end)
        some = np.flatnonzero(held & (late > 0) & (released != NULL_NS))
        messages = self._joined.messages
        all_ranks = np.concatenate([ranks, messages.rank[row[some]]]).astype(np.int64)
        all_causes = np.concatenate([cause, np.full(len(some), _TRANSFER)])
        all_peers = np.concatenate([peer, messages.peer[row[some]]]).astype(np.int64)
        # One number for each combination: comparing columns takes twenty times as long.
        peers = int(all_peers.max(initial=NULL)) + 2
        keys = (all_ranks * causes + all_causes) * peers + all_peers + 1
        found, which = np.unique(keys, return_inverse=True)
        none = np.zeros(len(some))

        def summed(values: FloatArray, more: FloatArray) -> FloatArray:
            weights = np.concatenate([values, more])
            sums = np.bincount(which, weights=weights, minlength=len(found))
            return sums.astype(np.float64)

        return _Sums(
            rank=found // peers // causes,
            cause=found // peers % causes,
            peer=found % peers - 1,
            direct=summed(delays.direct.ravel(), none),
            propagated=summed(delays.propagated.ravel(), none),
            slower=summed(np.zeros(len(cause)), np.minimum(late[some], moving[some])),
        )

    def _least(self, cause: int) -> IntArray:
        """Returns the time of the fastest rank for an activity in each step, ns."""
        if cause not in self._least_of:
            least = np.full(len(self._numbers), np.iinfo(np.int64).max)
            for rank, scan in self._scans.items():
                spent = lengths_within(
                    self._work[rank][CAUSES[cause]], scan.step_start, scan.step_end
                )
                np.minimum.at(least, np.searchsorted(self._numbers, scan.step), spent)
            self._least_of[cause] = least
        return self._least_of[cause]

    def _as_others(self, index: int) -> Scenario:
        """The run with a rank no longer at an activity than the rank that is fastest at it.

        This also shortens work for which no rank waited, such as that of a pipeline's last stage in
        backward.
        """
        rank, cause = int(self._sums.rank[index]), int(self._sums.cause[index])
        if cause == _TRANSFER:
            return Scenario()
        scan, work = self._scans[rank], self._work[rank][CAUSES[cause]]
        own = lengths_within(work, scan.step_start, scan.step_end)
        more = own - self._least(cause)[np.searchsorted(self._numbers, scan.step)]
        part = np.append(np.maximum(more, 0) / np.maximum(own, 1), 0.0)
        # Work is divided where messages are handed over and where other work begins; the end of
        # each piece is removed: the part of the step's excess that is of its name.
        messages = self._graph.handed_over[self._joined.rows(rank)]
        edges, name, times_more = self._excess_by_name(rank, CAUSES[cause])
        times = distinct(np.concatenate([messages, edges]))
        start, end = overlaps(work, divided_at(times))[2]

        def share() -> FloatArray:
            place = np.searchsorted(scan.step_start, start, side="right") - 1
            inside = (place >= 0) & (start < np.append(scan.step_end, 0)[place])
            segment = np.searchsorted(edges, start, side="right") - 1
            return np.where(inside, np.minimum(part[place] * times_more[name[segment]], 1.0), 0.0)

        gone = np.rint((end - start) * share()).astype(np.int64)
        some = np.flatnonzero(gone)
        return Scenario({rank: union(end[some] - gone[some], end[some])})

    def _excess_by_name(self, rank: int, activity: str) -> tuple[IntArray, IntArray, FloatArray]:
        """Returns how much more of each name's time is excess than of the activity's.

        The excess of a name is what the rank spends on it beyond the fastest of the other ranks
        that have it. Where no other rank has any, all names have excess in proportion to their
        time.

        Returns:
            Where the segments of the rank's timeline begin, the code of each one's name, and for
            each code, the last of which is for what has no name, the excess as a multiple.
        """
        line = self._scans[rank].timeline
        own = self._spent(rank, activity)
        if line is None or not own:
            return np.empty(0, np.int64), np.full(1, NULL), np.ones(1)
        others = [self._spent(each, activity) for each in self._scans if each != rank]
        shared = {name: [times[name] for times in others if name in times] for name in own}
        excess = {
            name: max(time - min(shared[name]), 0.0) if shared[name] else 0.0
            for name, time in own.items()
        }
        whole, more = sum(own.values()), sum(excess.values())
        times_more = np.ones(len(line.names) + 1)
        if more:
            for code, name in enumerate([*line.names, None]):
                time = own.get(name, 0.0)
                times_more[code] = excess.get(name, 0.0) / more * whole / time if time else 0.0
        return line.segments.time, line.segments.name.astype(np.int64), times_more

    def _spent(self, rank: int, activity: str) -> dict[str | None, float]:
        """Returns a rank's own work of an activity for each name, ns."""
        if (rank, activity) not in self._spent_of:
            scan, work = self._scans[rank], self._work[rank][activity]
            found = _time_by_name(scan, activity, self._windows.get(rank), work)
            self._spent_of[rank, activity] = found
        return self._spent_of[rank, activity]

    def _without(self, index: int) -> Scenario:
        """Returns the run without the excess time of one cause for which other ranks waited."""
        sums, delays = self._sums, self._delays
        rank, cause = int(sums.rank[index]), int(sums.cause[index])
        if cause == _TRANSFER:
            messages = self._joined.messages
            link = (messages.rank == rank) & (messages.peer == sums.peer[index])
            return Scenario(transfers=np.where(link & messages.is_p2p, self._slower, 0))
        mine = np.flatnonzero((delays.cause_rank == rank) & (delays.excess[:, cause] > 0))
        work = self._work[rank][CAUSES[cause]]
        came = delays.came[mine]
        done = length_before(work, came)
        return Scenario(
            {rank: intersect(work, union(_when(work, done - delays.excess[mine, cause]), came))}
        )


def known_or_range(
    saved: tuple[float, float] | None,
) -> tuple[float | None, tuple[float, float] | None]:
    """The values of `RootCause.saves_us` and `saves_range_us`, one of which is None at least.

    Args:
        saved: The lowest and the highest saving; None if it was not found.
    """
    if saved is None:
        return None, None
    is_known = saved[1] - saved[0] <= _SAME * saved[1]
    return (saved[1], None) if is_known else (None, saved)


def _when(spans: Spans, done: IntArray) -> IntArray:
    """When so much of a set of instants had passed."""
    if not len(spans.start):
        return np.zeros(len(done), dtype=np.int64)
    sums = np.append(0, np.cumsum(spans.end - spans.start))
    place = np.clip(np.searchsorted(sums, done, side="right") - 1, 0, len(spans.start) - 1)
    return np.asarray(spans.start[place] + np.maximum(done, 0) - sums[place])


def _steady_windows(scans: Mapping[int, RankScan], steady: IntArray) -> dict[int, tuple[int, int]]:
    """From the start of the first to the end of the last steady step, of each rank that has any."""
    found = {}
    for rank, scan in scans.items():
        mine = np.isin(scan.step, steady)
        if mine.any():
            found[rank] = (int(scan.step_start[mine].min()), int(scan.step_end[mine].max()))
    return found


def _counted(
    graph: Graph, windows: Mapping[int, tuple[int, int]], *, everything: bool
) -> BoolArray:
    """Which blocks begin within the window of their rank, or all."""
    blocks = graph.blocks
    counted = np.full(len(blocks), everything)
    for place, rank in enumerate(blocks.ranks):
        if rank in windows:
            begin, end = windows[rank]
            start = blocks.start[blocks.of(place)]
            counted[blocks.of(place)] = (start >= begin) & (start < end)
    return counted


def _time_by_name(
    scan: RankScan, activity: str, window: tuple[int, int] | None, work: Spans
) -> dict[str | None, float]:
    """Returns the work of a rank for each name of an activity, ns; None for no name."""
    line = scan.timeline
    if line is None or activity not in CATEGORY:
        return {}
    time, category, name = line.segments
    rows = np.flatnonzero(category[:-1] == CATEGORY[activity])
    begin, end = time[rows], time[rows + 1]
    if window is not None:
        begin, end = np.clip(begin, *window), np.clip(end, *window)
    names = [*line.names, None]
    codes = np.where(name[rows] == NULL, len(line.names), name[rows])
    sums = np.bincount(codes, weights=lengths_within(work, begin, end), minlength=len(names))
    return {called: total for called, total in zip(names, sums.tolist(), strict=True) if total}


def _slower_transfers(joined: Joined) -> IntArray:
    """Returns the time by which each receive's transfer exceeds the usual time on other links, ns.

    Usual is the median, over the other links, of the median transfer of messages of about that
    size (the same power of two). 0 where there is no other link to compare with.
    """
    messages = joined.messages
    slower = np.zeros(len(messages), dtype=np.int64)
    rows = np.flatnonzero(
        messages.op_is("recv") & (joined.partner != NULL) & (messages.end != NULL_NS)
    )
    if not len(rows):
        return slower
    wait, transfer = joined.wait_and_transfer()
    rows = rows[(wait[rows] != NULL) & (transfer[rows] >= 0)]
    size = np.maximum(messages.bytes[joined.partner[rows]], messages.out_bytes[rows])
    power = np.frexp(np.maximum(size, 1).astype(np.float64))[1]
    keys = np.stack([power, messages.peer[rows], messages.rank[rows]])
    links, which = np.unique(keys, axis=1, return_inverse=True)
    order = np.lexsort((transfer[rows], which))
    bounds = np.searchsorted(which[order], np.arange(links.shape[1] + 1))
    middle = (bounds[:-1] + bounds[1:] - 1) // 2
    typical = transfer[rows][order][middle]
    usual = np.full(links.shape[1], np.iinfo(np.int64).max)
    for size_class in distinct(links[0]).tolist():
        mine = np.flatnonzero(links[0] == size_class)
        if len(mine) > 1:
            usual[mine] = _median_of_others(typical[mine])
    slower[rows] = np.maximum(transfer[rows] - usual[which], 0)
    return slower


def _median_of_others(values: IntArray) -> IntArray:
    """For each value the (lower) median of all others."""
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values))
    middle = (len(values) - 2) // 2
    place = np.where(rank <= middle, middle + 1, middle)
    return values[order[place]]


class _CauseSums:
    """Merges root causes of waiting."""

    def __init__(self) -> None:
        self._costs: RowSums[RootCause] = RowSums("rank", "activity", "peer")
        self._saves = SavingSums(KeyedSums(3))
        self._names: dict[tuple[int, str, int | None], tuple[float, str]] = {}

    def add(self, causes: Iterable[RootCause], weight: float) -> None:
        """Adds the causes of a range."""
        rows = list(causes)
        keys = [(row.rank, row.activity, row.peer) for row in rows]
        self._costs.add(rows, weight)
        self._saves.add(dict(zip(keys, map(_range_of, rows), strict=True)), weight)
        for key, row in zip(keys, rows, strict=True):
            cost = row.cost_us * weight
            if row.name is not None and cost > self._names.get(key, (0.0, ""))[0]:
                self._names[key] = (cost, row.name)

    def result(self, weight: float, waiting_us: float) -> tuple[RootCause, ...]:
        """All causes, the most expensive first.

        Args:
            weight: Number of steps.
            waiting_us: All waiting per step.
        """
        saves = self._saves.means(weight)
        rows = []
        for row in self._costs.rows(weight):
            key = row.rank, row.activity, row.peer
            known, between = known_or_range(saves[key])
            rows.append(
                replace(
                    row,
                    name=self._names[key][1] if key in self._names else None,
                    share=(row.direct_us + row.propagated_us) / waiting_us if waiting_us else 0.0,
                    saves_us=known,
                    saves_range_us=between,
                )
            )
        return tuple(sorted(rows, key=lambda row: -row.cost_us))


def _range_of(row: RootCause) -> tuple[float, float] | None:
    """The lowest and the highest saving of a cause; None if it was not found."""
    if row.saves_range_us is not None or row.saves_us is None:
        return row.saves_range_us
    return row.saves_us, row.saves_us


class _WaitingAndCauses(NamedTuple):
    """How long ranks wait for each other, and why."""

    waiting: Waiting
    causes: tuple[RootCause, ...]


def find_causes(joined: JoinedSteps) -> _WaitingAndCauses:
    """Measures how long ranks wait for each other, and why."""
    finder = RootCauseFinder(joined)
    return _WaitingAndCauses(finder.waiting(), finder.causes(joined.once(find_savings)))


class _WaitingMerger:
    """Merges ranges of steps: means per step over all of them."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._totals: RowSums[Waiting] = RowSums()
        self._ranks: RowSums[RankWaiting] = RowSums("rank")
        self._causes = _CauseSums()

    def add(self, found: _WaitingAndCauses, steps: Steps) -> None:
        """Adds a range."""
        weight = float(len(steps))
        self._weight += weight
        self._totals.add([found.waiting], weight)
        self._ranks.add(found.waiting.ranks, weight)
        self._causes.add(found.causes, weight)

    def result(self) -> _WaitingAndCauses:
        """The waiting and its causes in all ranges."""
        ranks = tuple(sorted(self._ranks.rows(self._weight), key=lambda row: row.rank))
        waiting = replace(*self._totals.rows(self._weight), ranks=ranks)
        return _WaitingAndCauses(waiting, self._causes.result(self._weight, waiting.total_us))


WAITING: Final[Measure[_WaitingAndCauses, Waiting]] = Measure(
    "waiting",
    lambda whole: whole.found.of(WAITING).waiting,
    lambda joined: find_causes(joined),  # noqa: PLW0108 (benchmarks/scale.py replaces it)
    _WaitingMerger,
    of="steady",
)
ROOT_CAUSES: Final = derived("root_causes", lambda whole: whole.found.of(WAITING).causes)
