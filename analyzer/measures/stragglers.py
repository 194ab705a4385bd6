"""Late ranks: by how much and how often each is late, and which activity takes longer on it.

The frequency is a number of steps: a rank that is slightly late in every step and very late in a
few is late in those few. They are the smallest set of steps with 80 % of its lateness: 80 % of all
steps for a rank that is always equally late. If they are less than half of the steps, the rank is
late sometimes, and only those steps are searched for the activity that takes longer, because a
median over all steps would not show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, BoolArray, FloatArray, IntArray, distinct
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.distribution import Distribution, merged
from ddltrace.analyzer.measures.keyed_sums import KeyedSums, SavingSums
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole
from ddltrace.analyzer.measures.savings import find_savings
from ddltrace.analyzer.measures.steps import Steps, in_steps

_CAUSES: Final = {
    "compute": "compute_ns",
    "data": "data_ns",
    "copy": "copy_ns",
    "update": "update_ns",
    "host": "host_ns",
    "stopped": "stopped_ns",
    "network": "exposed_transfer_ns",
}
_MOST: Final = 0.8
_SOMETIMES: Final = 0.5
_OFTEN: Final = 0.65
"""A rank that is last this often delays the others, independent of the number of ranks."""

_MIN_SHARE: Final = 0.25
"""A cause must explain at least this part of the usual lateness to be named."""


@dataclass(frozen=True)
class StragglerRow:
    """How often and how much a rank is the last to arrive at collectives of steady steps.

    Attributes:
        rank: Global rank.
        lateness_us: Median over the collectives to which it is last of its lateness: its arrival
            minus the median arrival of the other ranks.
        lateness_us_total: Sum of the same differences.
        collectives_last: Number of collectives to which it arrives last.
        share: The same as a fraction of the collectives in which the rank takes part (those that
            all their ranks entered, of at least two ranks).
        cause: The activity that takes this rank longer than the others: ``compute``, ``data``,
            ``copy``, ``host``, ``update``, ``stopped`` (no thread of its process ran) or
            ``network`` (transfers that it waits for); None where the trace does not contain it.
        cause_us: Extra time of the cause: the rank's median per step minus the median over the
            other ranks.
        gc_us: Extra time of Python's garbage collections, likewise, which is part of that of the
            cause where they ran in it; None if they were not recorded.
        unsure: Whether its lateness is below the error of the aligned clocks.
        late_steps: The smallest number of steady steps with 80 % of its lateness.
        steps_share: These steps as a share of all steady steps.
        late_step_us: Median over these steps of the largest lateness in the step.
        sometimes: Whether it is late in less than half of the steps. If so, `cause` and `cause_us`
            refer to these steps.
        saves_us: Upper bound on the savings per step if no rank ever waited for this one, as in
            `Savings`; None without steps.
    """

    rank: int
    lateness_us: float
    lateness_us_total: float
    collectives_last: int
    share: float
    cause: str | None
    cause_us: float | None
    unsure: bool
    late_steps: int
    steps_share: float | None
    late_step_us: float | None
    sometimes: bool
    saves_us: float | None = None
    gc_us: float | None = None

    @property
    def is_garbage_collection(self) -> bool:
        """Whether garbage collections explain most of the extra time of its cause."""
        if self.gc_us is None or self.cause_us is None or self.cause in {None, "network"}:
            return False
        return self.gc_us > self.cause_us / 2


@dataclass(frozen=True)
class RankLateness:
    """How late one rank is at the collectives to which it arrives last, ns.

    Attributes:
        lateness: A - the median arrival of the other ranks, at each of these collectives.
        total: Sum of the same.
        step: The steps in which it arrives last to any, ascending.
        largest: The largest lateness in each of these steps.
    """

    lateness: Distribution
    total: float
    step: IntArray
    largest: FloatArray

    @staticmethod
    def merged(parts: Sequence[RankLateness]) -> RankLateness:
        """The same over the steps of all parts, which have no step in common."""
        if len(parts) == 1:
            return parts[0]
        step = np.concatenate([part.step for part in parts])
        order = np.argsort(step, kind="stable")
        return RankLateness(
            lateness=merged([part.lateness for part in parts]),
            total=sum(part.total for part in parts),
            step=step[order],
            largest=np.concatenate([part.largest for part in parts])[order],
        )


@dataclass(frozen=True)
class Lateness:
    """How late ranks are at collectives.

    Attributes:
        ranks: Rank -> how late it is, for ranks that ever arrive last, ascending.
        took_part: Rank -> the number of collectives in which it takes part.
    """

    ranks: dict[int, RankLateness]
    took_part: dict[int, int]

    def worst(self, most: int) -> list[int]:
        """The ranks with the largest sums of lateness, the worst first."""
        return sorted(self.ranks, key=lambda rank: -self.ranks[rank].total)[:most]


def find_lateness(joined: Joined, chosen: BoolArray) -> Lateness:
    """Measures how late ranks are.

    Lateness is A - the median arrival of the other ranks; of two ranks, the whole distance.

    Args:
        joined: All messages.
        chosen: Which collectives count.
    """
    collectives = joined.collectives
    usable = chosen & (collectives.ranks > 1)
    usable &= np.isin(collectives.state, (State.COMPLETE, State.OPEN))
    index = np.flatnonzero(usable & (collectives.last > collectives.first))
    last_rank = collectives.last_rank[index]
    lateness = collectives.last[index] - collectives.others[index]
    taken = np.flatnonzero(usable[joined.collective[joined.order]])
    took_part = np.bincount(joined.messages.rank[joined.order[taken]])
    found = {}
    for rank in distinct(last_rank).tolist():
        mine = lateness[last_rank == rank]
        step, largest = _largest_in_steps(collectives.step[index[last_rank == rank]], mine)
        values = Distribution(mine.astype(np.float64))
        found[rank] = RankLateness(values, float(mine.sum()), step, largest)
    took = np.flatnonzero(took_part)
    return Lateness(found, dict(zip(took.tolist(), took_part[took].tolist(), strict=True)))


def straggler_rows(
    lateness: Lateness,
    rank_steps: Mapping[str, FloatArray],
    steady: BoolArray,
    residual_ns: float | None,
) -> tuple[StragglerRow, ...]:
    """One row per rank that is ever the last to arrive, the worst first.

    The cause is the category in which the rank's median per step exceeds the median over the other
    ranks of theirs by most, if that explains a quarter of its usual lateness. Its own network is
    the cause if transfers, everybody having come, keep it waiting longer than they keep the others.

    Args:
        lateness: See `find_lateness`.
        rank_steps: Measures per rank and step, see `ddltrace.analyzer.measures.breakdown`.
        steady: Which entries of `rank_steps` count.
        residual_ns: Remaining error of the aligned clocks; None if unknown.
    """
    steps = distinct(rank_steps["step"][steady])
    rows = []
    for rank, mine in lateness.ranks.items():
        typical = mine.lateness.median() or 0.0
        late, by_step = _late_steps(mine.step, mine.largest)
        sometimes = 0 < len(late) < _SOMETIMES * len(steps)
        looked_at = steady & np.isin(rank_steps["step"], late) if sometimes else steady
        in_step = float(np.median(by_step)) if len(late) else None
        usual = in_step if sometimes and in_step is not None else typical
        cause, excess = _cause(rank, rank_steps, looked_at, usual)
        gc_ns = _excess(rank, rank_steps["rank"][looked_at], rank_steps["gc_ns"][looked_at])
        rows.append(
            StragglerRow(
                rank=rank,
                lateness_us=typical / 1e3,
                lateness_us_total=mine.total / 1e3,
                collectives_last=len(mine.lateness),
                share=len(mine.lateness) / lateness.took_part[rank],
                cause=cause,
                cause_us=None if excess is None else excess / 1e3,
                unsure=residual_ns is None or (residual_ns > 0 and typical < residual_ns),
                late_steps=len(late),
                steps_share=len(late) / len(steps) if len(steps) else None,
                late_step_us=None if in_step is None else in_step / 1e3,
                sometimes=sometimes,
                gc_us=None if gc_ns is None else gc_ns / 1e3,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.lateness_us_total))


def delays_others(rows: tuple[StragglerRow, ...], num_ranks: int) -> StragglerRow | None:
    """Returns the rank that the others wait for; None if there is none, or if it alternates.

    A rank that is late sometimes must hold half of what an equal share of all lateness leaves
    to a whole; one that is always late must come last to twice its equal share of collectives,
    or to most of them.

    Args:
        rows: The stragglers, the worst first.
        num_ranks: Number of ranks of the job.
    """
    if not rows:
        return None
    worst = rows[0]
    in_all = sum(row.lateness_us_total for row in rows)
    dominates = worst.lateness_us_total >= (1 + 1 / num_ranks) / 2 * in_all
    often = worst.share >= min(_OFTEN, 2 / num_ranks)
    return worst if often or (worst.sometimes and dominates) else None


def _largest_in_steps(step: IntArray, lateness: IntArray) -> tuple[IntArray, FloatArray]:
    """The steps in which a rank is late, and the largest lateness in each.

    One delay may be seen in many collectives.

    Args:
        step: The step of each collective to which the rank came last; negative for none.
        lateness: The rank's lateness in each of those collectives.
    """
    inside = step != NULL
    number, which = np.unique(step[inside], return_inverse=True)
    largest = np.zeros(len(number))
    np.maximum.at(largest, which, lateness[inside])
    return number, largest


def _late_steps(number: IntArray, largest: FloatArray) -> tuple[IntArray, FloatArray]:
    """The fewest steps that hold most of a rank's lateness, and theirs (ns), the worst first."""
    worst = np.argsort(-largest, kind="stable")
    held = np.cumsum(largest[worst])
    # Slightly less than 80 %, so that four of five equal steps suffice despite rounding.
    count = int(np.searchsorted(held, _MOST * held[-1] * (1 - 1e-9))) + 1 if len(held) else 0
    return number[worst[:count]], largest[worst[:count]]


def _cause(
    rank: int,
    rank_steps: Mapping[str, FloatArray],
    steady: BoolArray,
    lateness_ns: float,
) -> tuple[str | None, float | None]:
    ranks = rank_steps["rank"][steady]
    best, best_excess = None, 0.0
    for cause, column in _CAUSES.items():
        excess = _excess(rank, ranks, _exclusive(rank_steps, column)[steady])
        if excess is not None and excess > best_excess:
            best, best_excess = cause, excess
    if best is None or best_excess < _MIN_SHARE * lateness_ns:
        return None, None
    return best, best_excess


def _excess(rank: int, ranks: FloatArray, values: FloatArray) -> float | None:
    """A rank's median minus that of the other ranks' medians; None if a value is not known."""
    mine = ranks == rank
    others = _medians(ranks[~mine], values[~mine])
    if not mine.any() or not others or np.isnan(values).any():
        return None
    return float(np.median(values[mine]) - np.median(others))


def _exclusive(rank_steps: Mapping[str, FloatArray], column: str) -> FloatArray:
    """Compute without the update, which counts as compute everywhere else."""
    values = rank_steps[column]
    return values - rank_steps["update_ns"] if column == "compute_ns" else values


def _medians(ranks: FloatArray, values: FloatArray) -> list[float]:
    if not len(ranks):
        return []
    order = np.argsort(ranks, kind="stable")
    bounds = np.flatnonzero(np.diff(ranks[order])) + 1
    return [float(np.median(part)) for part in np.split(values[order], bounds)]


_REPLAYED: Final = 32


class _Stragglers(NamedTuple):
    """How late ranks are, and what a step would save if no rank waited for the worst."""

    lateness: Lateness
    saves: dict[int, float]


def _stragglers(joined: JoinedSteps) -> _Stragglers:
    collectives = joined.joined.collectives
    has_steps = len(joined.steps) > 0
    chosen = in_steps(collectives.step, joined.steady) if has_steps else joined.chosen_collectives
    lateness = find_lateness(joined.joined, chosen)
    finder = joined.once(find_savings)
    saves = {} if finder is None else finder.by_rank(lateness.worst(_REPLAYED))
    if joined.in_ranges:
        ranks = {
            rank: replace(late, lateness=late.lateness.rounded())
            for rank, late in lateness.ranks.items()
        }
        lateness = Lateness(ranks, lateness.took_part)
    return _Stragglers(lateness, saves)


class _StragglerMerger:
    """Merges ranges of steps: a saving is a mean over the steps of the ranges that know it."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._lateness: dict[int, RankLateness] = {}
        self._took_part: Counter[int] = Counter()
        self._saves = SavingSums(KeyedSums(3))

    def add(self, found: _Stragglers, steps: Steps) -> None:
        """Adds a range."""
        lateness, weight = found.lateness, float(len(steps))
        self._weight += weight
        for rank, late in lateness.ranks.items():
            known = self._lateness.get(rank)
            self._lateness[rank] = late if known is None else RankLateness.merged([known, late])
        saves = {rank: found.saves.get(rank) for rank in lateness.ranks}
        self._saves.add(
            {rank: None if us is None else (us, us) for rank, us in saves.items()}, weight
        )
        self._took_part.update(lateness.took_part)

    def result(self) -> _Stragglers:
        """The measures of all ranges."""
        saves = self._saves.means(self._weight)
        return _Stragglers(
            Lateness(dict(sorted(self._lateness.items())), dict(self._took_part)),
            {rank: pair[1] for rank, pair in saves.items() if pair is not None},
        )


def _rows(whole: Whole) -> tuple[StragglerRow, ...]:
    lateness, saves = whole.found.of(STRAGGLERS)
    rows = straggler_rows(lateness, whole.rank_steps, whole.window, whole.residual_ns)
    return tuple(replace(row, saves_us=saves.get(row.rank)) for row in rows)


STRAGGLERS: Final = Measure("stragglers", _rows, _stragglers, _StragglerMerger, of="steady")
