"""Steady steps that took much longer than the others, and the categories of their extra time.

The rule is the modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers",
1993; NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.17): a step is slow where
0.6745 (wall - median) / MAD > 3.5, MAD the median of |wall - median|. Half of the steps may be
disturbed before median and MAD follow them. Only longer steps count, and only those at least 5 %
longer than the median: if steps hardly differ, the score classifies negligible differences as
outliers.

The critical path attributes the extra time: for each category, its time on the path of the slow
step less its usual time. The usual time is its mean over the steps that are not slow, scaled so
that all categories sum to the median step; so the differences sum to the extra time. For each
category, the reported rank is the one whose time on the path grew most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, FloatArray, IntArray
from ddltrace.analyzer.events.rank_timeline import CATEGORIES, CATEGORY
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, merged_by

_SCORE: Final = 3.5
_NORMAL: Final = 0.6745
"""MAD over standard deviation of a normal distribution."""
_LEAST: Final = 0.05
_MIN_STEPS: Final = 8

RULE: Final = (
    f"longer than the median step by more than {_SCORE} MAD / {_NORMAL} "
    f"(modified z-score over {_SCORE}, Iglewicz and Hoaglin 1993) and by {_LEAST * 100:.0f} %"
)
RULE_FEW: Final = f"fewer than {_MIN_STEPS} steady steps: too few to tell slow ones"


@dataclass(frozen=True)
class ExtraTime:
    """Extra time of one category on the critical path of a slow step, compared with its usual time.

    Attributes:
        category: One of `CATEGORIES`.
        rank: The rank on which it grew most; None if it did not grow.
        name: The layer, tensor or operation with most of this time on that rank; None without a
            name.
        us: Extra time; negative if the slow step has less than usual. All values sum to
            `SlowStep.longer_us`.
    """

    category: str
    rank: int | None
    name: str | None
    us: float


@dataclass(frozen=True)
class SlowStep:
    """One steady step that took much longer than the others.

    Attributes:
        step: Its number.
        wall_us: From its earliest start to its latest end on any rank.
        longer_us: Difference from the median of the steady steps.
        score: Its modified z-score; None where more than half of the steps took the same time.
        extra: The extra time by category, the largest difference first.
    """

    step: int
    wall_us: float
    longer_us: float
    score: float | None
    extra: tuple[ExtraTime, ...]


@dataclass(frozen=True)
class SlowSteps:
    """The outliers among the steady steps, the slowest first.

    Attributes:
        rule: Definition of a slow step, or why slow steps cannot be determined.
        median_us: Median wall time of the steady steps; None with too few of them.
        limit_us: Steps longer than this are slow; None with too few steady steps.
        steps: The slow steps.
    """

    rule: str
    median_us: float | None
    limit_us: float | None
    steps: tuple[SlowStep, ...]


@dataclass(frozen=True)
class PathSums:
    """The time of a path by rank and category, where there is any.

    Attributes:
        rank: The rank of each entry.
        category: Its code in `CATEGORY`.
        ns: Its time.
        name: Index into `names` of the layer, tensor or operation with most of this time; `NULL`
            if that has no name.
        names: Names of all entries.
    """

    rank: IntArray
    category: IntArray
    ns: FloatArray
    name: IntArray
    names: list[str]

    def dense(self, ranks: int) -> FloatArray:
        """The time by rank and category, shape (ranks, categories)."""
        found = np.zeros((ranks, len(CATEGORIES)))
        found[self.rank, self.category] = self.ns
        return found

    def main_name(self, code: int, rank: int) -> str | None:
        """The name with most of a category on a rank; None where that has no name."""
        (places,) = np.nonzero((self.rank == rank) & (self.category == code))
        name = int(self.name[places[0]]) if len(places) else NULL
        return None if name == NULL else self.names[name]

    def compact(self) -> PathSums:
        """The same without names that do not occur."""
        used, which = np.unique(np.append(self.name, NULL), return_inverse=True)
        names = [self.names[code] for code in used[1:].tolist()]
        return replace(self, name=which[:-1] - 1, names=names)


def path_sums(path: Path) -> PathSums:
    """Sums a path by rank and category."""
    length = path.end - path.start
    stride = len(path.names) + 1
    place = path.rank.astype(np.int64) * len(CATEGORIES) + path.category
    keys, which = np.unique(place * stride + path.name + 1, return_inverse=True)
    of_name = np.bincount(which, weights=length, minlength=len(keys))
    places = keys // stride
    # The last of each place is the name with the most time; of equal ones, the first.
    order = np.lexsort((-keys, of_name, places))
    last = np.append(np.diff(places[order]) != 0, True) if len(order) else order.astype(bool)
    found, of_place = np.unique(places, return_inverse=True)
    return PathSums(
        rank=found // len(CATEGORIES),
        category=found % len(CATEGORIES),
        ns=np.bincount(of_place, weights=of_name, minlength=len(found)).astype(np.float64),
        name=keys[order[last]] % stride - 1,
        names=path.names,
    )


def _slow_steps(whole: Whole) -> SlowSteps:
    """Finds the slow steps among the steady steps, slowest first."""
    steps, sums = whole.steps, whole.found.of(SLOW_STEPS)
    number = steps.number[steps.steady]
    wall = (steps.end - steps.start)[steps.steady].astype(np.float64)
    if len(wall) < _MIN_STEPS:
        return SlowSteps(rule=RULE_FEW, median_us=None, limit_us=None, steps=())
    median = float(np.median(wall))
    mad = float(np.median(np.abs(wall - median)))
    limit = max(median + _SCORE * mad / _NORMAL, median * (1 + _LEAST))
    is_slow = wall > limit
    slow = number[is_slow].tolist()
    paths = {step: sums[step] for step in number.tolist()} if slow else {}
    ranks = 1 + max((int(path.rank.max(initial=0)) for path in paths.values()), default=0)
    usual = _usual(number[~is_slow].tolist(), paths, ranks, median) if slow else None
    rows = [
        SlowStep(
            step=step,
            wall_us=length / 1e3,
            longer_us=(length - median) / 1e3,
            score=_NORMAL * (length - median) / mad if mad else None,
            extra=() if usual is None else _extra(paths[step], usual),
        )
        for step, length in zip(slow, wall[is_slow].tolist(), strict=True)
    ]
    return SlowSteps(
        rule=RULE,
        median_us=median / 1e3,
        limit_us=limit / 1e3,
        steps=tuple(sorted(rows, key=lambda row: -row.wall_us)),
    )


def _usual(
    ordinary: list[int], paths: Mapping[int, PathSums], ranks: int, median: float
) -> FloatArray:
    """The mean path of ordinary steps by rank and category, scaled to sum to the median step."""
    total = np.zeros((ranks, len(CATEGORIES)))
    for step in ordinary:
        path = paths[step]
        total[path.rank, path.category] += path.ns
    return np.asarray(total * (median / total.sum()))


def _extra(path: PathSums, usual: FloatArray) -> tuple[ExtraTime, ...]:
    """Returns the differences of a path from the usual times by category, largest first."""
    more = path.dense(len(usual)) - usual
    rows = []
    for name, code in CATEGORY.items():
        difference = float(more[:, code].sum())
        if abs(difference) < 1:  # below a nanosecond: what scaling leaves
            continue
        rank = int(np.argmax(more[:, code])) if difference > 0 else None
        rows.append(
            ExtraTime(
                category=name,
                rank=rank,
                name=None if rank is None else path.main_name(code, rank),
                us=difference / 1e3,
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.us)))


def _sums(joined: JoinedSteps) -> dict[int, PathSums]:
    sums = {step: path_sums(path) for step, path in joined.paths.items()}
    return {step: each.compact() for step, each in sums.items()} if joined.in_ranges else sums


SLOW_STEPS: Final[Measure[dict[int, PathSums], SlowSteps]] = Measure(
    "slow_steps",
    _slow_steps,
    _sums,
    merged_by(lambda former, later: former | later),
)
