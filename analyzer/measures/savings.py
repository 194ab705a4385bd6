"""Possible savings per step if some work took no time: upper bounds from replays of the run.

Every bound is the difference between the recorded run and its replay without that work (see
`ddltrace.analyzer.joined.replay`), as a mean over the steady steps. It never exceeds the mean step.

Some time of a rank may be neither work nor waiting that the trace explains: times without a record
where only the device was recorded, and waiting for messages that could not be joined. Kept as work,
it hides what is saved on other ranks; if it was waiting, it goes when its cause goes. So every
scenario is replayed both ways: with that time kept, and without it, compared with a replay without
it as well. The difference between both is what the trace does not show. In a job of which all
dependencies are known (StragglerAnalysis), all such time is waiting, as in
`ddltrace.analyzer.measures.ideal_job`.

Without the fault of a rank, the ranks of a host share its processors at times at which the late one
slept. So what is saved if ranks are as the others is bounded by the processors as well, see
`ddltrace.analyzer.measures.processor_time`. Savings without all work of a category are not: the
processor time of that work is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, IntArray, by_place, find
from ddltrace.analyzer.events.interval_sets import Spans, merge, union
from ddltrace.analyzer.events.own_work import unblocked
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.joined.replay import Replay, Scenario, StepEnds
from ddltrace.analyzer.measures.keyed_sums import RowSums
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, derived
from ddltrace.analyzer.measures.path_parts import MOST_PARTS, PathPart, PathRank, path_parts
from ddltrace.analyzer.measures.processor_time import host_uses
from ddltrace.analyzer.measures.steps import Steps

_OWN: Final = ("compute", "update", "data", "copy", "host")


@dataclass(frozen=True)
class Savings:
    """Upper bounds on the savings per step, from replays of the steady steps.

    A replay keeps the order of every rank's work. A rank works for the recorded time minus the
    removed time, then waits for its message, which completes its recorded transfer time after the
    last required rank has entered it. A bound is the difference between the ends of the recorded
    and the replayed steady steps, divided by the number of steps. It is valid unless the change
    slows other work, and exact if the change removes all of the named time and nothing else
    changes. Communication that compute hides completely stays hidden in a replay without that
    compute: in this case a bound is too high. No bound is more than `step_us`.

    If a late rank no longer sleeps, all ranks of its host compute at the same time. So what is
    saved if ranks are as the others (`imbalance_us`, `StragglerRow.saves_us`,
    `RootCause.saves_us`) is at most the time per step minus (processor time per step of all ranks
    of a host, without what the late rank uses more than the median of its other ranks) /
    (processors of the host), where the trace has the counters ``process_cpu_time`` and
    ``host_processors``.

    Time that nothing explains (unrecorded time where the trace records nothing of the host, and
    waiting for messages that could not be joined) is replayed once as work and once as waiting,
    which is in neither run then; a bound is the larger of both. In a job of which all dependencies
    are known (StragglerAnalysis), all of it is waiting, as in `IdealJob`.

    Attributes:
        step_us: The mean of `Summary.step_us`, to which the bounds refer.
        compute_us: Forward, backward and other layers take no time on any rank.
        update_us: The optimizer takes no time on any rank.
        data_us: Fetching batches takes no time on any rank.
        copy_us: Device copies outside of compute take no time on any rank.
        host_us: Host code outside of these takes no time on any rank.
        transfer_us: Every message completes as soon as its last rank has entered it.
        imbalance_us: At every collective, all ranks arrive with the first one.
    """

    step_us: float
    compute_us: float
    update_us: float
    data_us: float
    copy_us: float
    host_us: float
    transfer_us: float
    imbalance_us: float


class SavingsFinder:
    """Replays the steady steps of a run."""

    def __init__(self, steps: JoinedSteps) -> None:
        scans, joined = steps.scans, steps.joined
        self._scans, self._joined, self._work = scans, joined, steps.work
        self._hosts = host_uses(steps.trace, steps.steady)
        self._dependencies_known = steps.dependencies_known
        self._unrecorded = {
            rank: scan.activity.unrecorded
            for rank, scan in scans.items()
            if len(scan.activity.unrecorded.start)
        }
        steady = steps.steady
        wall = (steps.steps.end - steps.steps.start)[steps.steps.steady]
        self._mean_us = float(wall.mean()) / 1e3 if len(wall) else 0.0
        former = [scan.step[scan.step < steady[0]].max(initial=NULL) for scan in scans.values()]
        lead_in = max(map(int, former)) if len(steady) else NULL
        replayed = np.append(steady, lead_in) if lead_in != NULL else steady
        mine = {rank: np.isin(scan.step, replayed) for rank, scan in scans.items()}
        self._replay = Replay(
            steps.graph,
            joined,
            StepEnds(
                rank=np.concatenate([np.full(int(m.sum()), rank) for rank, m in mine.items()]),
                step=np.concatenate([scans[rank].step[m] for rank, m in mine.items()]),
                start=np.concatenate([scans[rank].step_start[m] for rank, m in mine.items()]),
                end=np.concatenate([scans[rank].step_end[m] for rank, m in mine.items()]),
                lead_in=None if lead_in == NULL else lead_in,
            ),
        )
        wait, transfer = joined.wait_and_transfer()
        self._transfer = np.where(wait == NULL, 0, np.maximum(transfer, 0))

    def by_category(self) -> Savings:
        """Returns the possible savings of each category, over all ranks."""
        scenarios = [
            Scenario({rank: parts[name] for rank, parts in self._work.items()}) for name in _OWN
        ]
        # Nobody knows when the last rank came to a message that could not be joined.
        scenarios += [
            Scenario(transfers=self._transfer, elastic=True),
            Scenario(balanced=True, elastic=True),
        ]
        saved = self.saved(scenarios)
        return Savings(
            step_us=self._mean_us,
            **{f"{name}_us": us for name, us in zip(_OWN, saved, strict=False)},
            transfer_us=saved[-2],
            imbalance_us=self.within_processors(saved[-1], tuple(self._scans)),
        )

    def by_rank(self, ranks: Sequence[int]) -> dict[int, float]:
        """Returns, for each rank, the savings if no rank ever waited for it."""
        scenarios = [Scenario({rank: unblocked(self._scans[rank])}) for rank in ranks]
        saved = zip(ranks, self.saved(scenarios), strict=True)
        return {rank: self.within_processors(us, (rank,)) for rank, us in saved}

    def within_processors(self, us: float, ranks: Sequence[int]) -> float:
        """Returns the part of savings that the processors of the hosts allow, us per step.

        Args:
            us: The savings without that bound.
            ranks: Ranks that are as the others then.
        """
        return min([us, *(host.most_saved_us(ranks) for host in self._hosts)])

    def by_part(self, parts: Sequence[PathPart], paths: Sequence[Path]) -> list[float]:
        """Returns the possible savings of each part of the critical path on its rank alone."""
        pieces = _pieces_of(parts, paths)
        everywhere = self._everywhere(parts)

        def scenario(number: int, part: PathPart) -> Scenario:
            start, end, message = pieces[number]
            if part.category == "transfer":
                return Scenario(transfers=self._transfers_of(message))
            spans = everywhere.get(number)
            return Scenario({part.rank: union(start, end) if spans is None else spans})

        saved = self.saved(scenario(number, part) for number, part in enumerate(parts))
        # The dependencies of unexplained waiting are unknown.
        return [
            part.us if part.category == "wait" else us
            for part, us in zip(parts, saved, strict=True)
        ]

    def _transfers_of(self, rows: IntArray) -> IntArray:
        """The transfers of some messages on all their ranks, zero for others."""
        joined = self._joined
        wanted = np.zeros(len(joined.messages) + 1, dtype=bool)
        wanted[rows] = wanted[joined.partner[rows]] = True
        collectives = np.zeros(len(joined.collectives) + 1, dtype=bool)
        collectives[joined.collective[rows]] = True
        collectives[NULL] = False
        return np.where(wanted[:-1] | collectives[joined.collective], self._transfer, 0)

    def _everywhere(self, parts: Sequence[PathPart]) -> dict[int, Spans]:
        """All instants of parts on their ranks, on the path or not, by their place in `parts`.

        Without those of ranks whose timelines are not at hand, of gradients, and of backward where
        gradients divide it: the timeline has all of backward under one name.
        """
        found: dict[int, Spans] = {}
        for rank in {part.rank for part in parts}:
            line = self._scans[rank].timeline
            if line is None:
                continue
            divided = line.backward if len(line.gradient_time) else NULL
            codes = {name: code for code, name in enumerate(line.names) if code != divided}
            stride = len(line.names) + 1
            codes_of = {
                number: (NULL if part.name is None else codes[part.name])
                + 1
                + CATEGORIES.index(part.category) * stride
                for number, part in enumerate(parts)
                if part.rank == rank and (part.name is None or part.name in codes)
            }
            time, category, name = line.segments
            keys = category[:-1].astype(np.int64) * stride + name[:-1] + 1
            rows = _grouped(keys, np.array(list(codes_of.values()), dtype=np.int64))
            for number, mine in zip(codes_of, rows, strict=True):
                bounded = mine[time[mine] != NULL_NS]
                found[number] = union(time[bounded], time[bounded + 1])
        return found

    def saved(self, scenarios: Iterable[Scenario]) -> list[float]:
        """Returns the largest savings of each scenario, us per step."""
        return [most for _, most in self.ranges(scenarios)]

    def ranges(self, scenarios: Iterable[Scenario]) -> list[tuple[float, float]]:
        """Returns the savings of each scenario with unexplained time as work and as waiting.

        Args:
            scenarios: Few are held in memory at a time.

        Returns:
            The lower and the higher of both, us per step; they are equal where all time is
            explained, and in a job of which all dependencies are known.
        """
        replay = self._replay
        if not replay.has_unexplained and not self._unrecorded:
            return [(self._us(ns), self._us(ns)) for ns in replay.saved(scenarios)]
        (nothing,) = replay.saved([self._elastic(Scenario())])
        found = []
        remaining = iter(scenarios)
        while some := list(islice(remaining, replay.at_once)):
            vanished = [ns - nothing for ns in replay.saved(map(self._elastic, some))]
            kept = vanished if self._dependencies_known else replay.saved(some)
            found += [
                (self._us(min(pair)), self._us(max(pair)))
                for pair in zip(kept, vanished, strict=True)
            ]
        return found

    def _elastic(self, scenario: Scenario) -> Scenario:
        """The scenario without the time that nothing explains."""
        work = dict(scenario.work)
        for rank, spans in self._unrecorded.items():
            work[rank] = merge(work[rank], spans) if rank in work else spans
        return replace(scenario, work=work, elastic=True)

    def _us(self, ns: float) -> float:
        return min(max(ns, 0.0) / 1e3, self._mean_us)


def _pieces_of(
    parts: Sequence[PathPart], paths: Sequence[Path]
) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Start, end and message of all pieces of each part."""
    if not paths:
        return []
    codes = {name: code for code, name in enumerate(paths[0].names)}
    stride = len(codes) + 1

    def key(rank: IntArray, category: IntArray, name: IntArray) -> IntArray:
        return (rank * len(CATEGORIES) + category) * stride + name + 1

    wanted = key(
        np.array([part.rank for part in parts], dtype=np.int64),
        np.array([CATEGORIES.index(part.category) for part in parts], dtype=np.int64),
        np.array([NULL if part.name is None else codes[part.name] for part in parts], np.int64),
    )
    rank, category, name, start, end, message = (
        np.concatenate([getattr(path, column) for path in paths])
        for column in ("rank", "category", "name", "start", "end", "message")
    )
    rows_of_parts = _grouped(key(rank.astype(np.int64), category, name), wanted)
    return [(start[rows], end[rows], message[rows]) for rows in rows_of_parts]


def _grouped(keys: IntArray, wanted: IntArray) -> list[IntArray]:
    """The rows of each wanted key."""
    place = find(keys, wanted)
    rows = np.flatnonzero(place != NULL)
    return [rows[each] for each in by_place(place[rows], len(wanted))]


def find_savings(joined: JoinedSteps) -> SavingsFinder | None:
    """Replays the steady steps; None without any."""
    return SavingsFinder(joined) if len(joined.steady) else None


class _PathSavings(NamedTuple):
    """The critical paths of the steady steps, and what they would save.

    Attributes:
        parts: Parts of these paths, the largest first.
        by_rank: These paths by category and rank.
        savings: Possible savings by category; None without steps.
    """

    parts: tuple[PathPart, ...]
    by_rank: tuple[PathRank, ...]
    savings: Savings | None


def find_path_savings(joined: JoinedSteps) -> _PathSavings:
    """Measures the critical paths of the steady steps."""
    paths = joined.steady_paths
    parts, by_rank = path_parts(paths, None if joined.in_ranges else MOST_PARTS)
    finder = joined.once(find_savings)
    if finder is None:
        return _PathSavings(parts, by_rank, None)
    alone = finder.by_part(parts[:MOST_PARTS], paths)
    replayed = (
        replace(part, alone_us=us) for part, us in zip(parts[:MOST_PARTS], alone, strict=True)
    )
    return _PathSavings((*replayed, *parts[MOST_PARTS:]), by_rank, finder.by_category())


class _PathMerger:
    """Merges ranges of steps: means per step over all of them."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._parts: RowSums[PathPart] = RowSums("category", "rank", "name")
        self._by_rank: RowSums[PathRank] = RowSums("category", "rank")
        self._savings: RowSums[Savings] = RowSums()

    def add(self, found: _PathSavings, steps: Steps) -> None:
        """Adds a range."""
        weight = float(len(steps))
        self._weight += weight
        self._parts.add(found.parts, weight)
        self._by_rank.add(found.by_rank, weight)
        self._savings.add([] if found.savings is None else [found.savings], weight)

    def result(self) -> _PathSavings:
        """The paths and savings of all ranges."""
        parts = sorted(self._parts.rows(self._weight), key=lambda row: -row.us)
        total = sum(row.us for row in parts)
        by_rank = self._by_rank.rows(self._weight)
        by_rank.sort(key=lambda row: (row.rank, CATEGORIES.index(row.category)))
        return _PathSavings(
            tuple(replace(row, share=row.us / total if total else 0.0) for row in parts),
            tuple(by_rank),
            next(iter(self._savings.rows(self._weight)), None),
        )


CRITICAL_PATH: Final[Measure[_PathSavings, tuple[PathPart, ...]]] = Measure(
    "critical_path",
    lambda whole: whole.found.of(CRITICAL_PATH).parts[:MOST_PARTS],
    lambda joined: joined.once(find_path_savings),
    _PathMerger,
    of="steady",
)
CRITICAL_PATH_BY_RANK: Final = derived(
    "critical_path_by_rank", lambda whole: whole.found.of(CRITICAL_PATH).by_rank
)
SAVINGS: Final = derived("savings", lambda whole: whole.found.of(CRITICAL_PATH).savings)
