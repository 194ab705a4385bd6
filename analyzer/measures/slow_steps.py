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
from typing import Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import NULL, BoolArray
from ddltrace.analyzer.events.rank_timeline import CATEGORY
from ddltrace.analyzer.joined.critical_path import Path
from ddltrace.analyzer.measures.steps import Steps
from ddltrace.analyzer.model import CATEGORIES, ExtraTime, SlowStep, SlowSteps

FloatArray = npt.NDArray[np.float64]

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


def slow_steps(steps: Steps, paths: Mapping[int, Path]) -> SlowSteps:
    """Finds the slow steps among the steady steps, slowest first.

    Args:
        steps: All steps.
        paths: Step -> its critical path.
    """
    number = steps.number[steps.steady]
    wall = (steps.end - steps.start)[steps.steady].astype(np.float64)
    if len(wall) < _MIN_STEPS:
        return SlowSteps(rule=RULE_FEW, median_us=None, limit_us=None, steps=())
    median = float(np.median(wall))
    mad = float(np.median(np.abs(wall - median)))
    limit = max(median + _SCORE * mad / _NORMAL, median * (1 + _LEAST))
    is_slow = wall > limit
    slow = number[is_slow].tolist()
    ranks = 1 + max((int(paths[n].rank.max(initial=0)) for n in number.tolist()), default=0)
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


def _by_rank(path: Path, ranks: int) -> FloatArray:
    """Time of a path by rank and category, shape (ranks, categories), ns."""
    key = path.rank * len(CATEGORIES) + path.category
    sums = np.bincount(key, weights=path.end - path.start, minlength=ranks * len(CATEGORIES))
    return sums.astype(np.float64).reshape(ranks, len(CATEGORIES))


def _usual(ordinary: list[int], paths: Mapping[int, Path], ranks: int, median: float) -> FloatArray:
    """The mean path of ordinary steps by rank and category, scaled to sum to the median step."""
    total = np.zeros((ranks, len(CATEGORIES)))
    for step in ordinary:
        total += _by_rank(paths[step], ranks)
    return np.asarray(total * (median / total.sum()))


def _extra(path: Path, usual: FloatArray) -> tuple[ExtraTime, ...]:
    """Returns the differences of a path from the usual times by category, largest first."""
    more = _by_rank(path, len(usual)) - usual
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
                name=None if rank is None else _main_name(path, code, rank),
                us=difference / 1e3,
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.us)))


def _main_name(path: Path, code: int, rank: int) -> str | None:
    """The name that holds most of a category on a rank; None where that has no name."""
    chosen: BoolArray = (path.category == code) & (path.rank == rank)
    if not chosen.any():
        return None
    sums = np.bincount(path.name[chosen] + 1, weights=(path.end - path.start)[chosen])
    name = int(np.argmax(sums)) - 1
    return None if name == NULL else path.names[name]
