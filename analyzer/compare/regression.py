"""``compare --fail-on``: a limit on a difference between two traces, for checks in CI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.compare.comparison import Comparison, Difference
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.tracer.errors import ThresholdError, UsageError

KEYS: Final = (
    "step_us",
    "rank_step_us",
    "overlap_ratio",
    "compute_share",
    "exposed_comm_share",
    "idle_share",
    *(f"{category}_us" for category in CATEGORIES),
)
"""Keys of a limit: the step over all ranks and on one, its shares, parts of its critical path."""

_EXPRESSION: Final = re.compile(
    r"\s*(?P<key>[a-z0-9_]+)\s*(?P<operator>[<>])\s*"
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<percent>\s*%)?\s*\Z"
)


@dataclass(frozen=True)
class Limit:
    """A limit on a change.

    Attributes:
        text: The expression as it was given.
        key: One of `KEYS`.
        rises: Whether the check fails above the limit, not below it.
        change: The limit, after - before; relative to before if `relative`.
        relative: Whether `change` is a fraction of the value before.
    """

    text: str
    key: str
    rises: bool
    change: float
    relative: bool


def parse_limit(expression: str) -> Limit:
    """Reads an expression such as ``step_us>+5%`` or ``overlap_ratio<-0.1``.

    Args:
        expression: ``KEY>CHANGE`` or ``KEY<CHANGE``; a change is after - before, in percent of
            before where it ends in ``%``.

    Raises:
        UsageError: It is not of that form, or there is no such key.
    """
    match = _EXPRESSION.match(expression)
    if match is None:
        raise UsageError(
            f"--fail-on {expression!r:.60}: write KEY>CHANGE or KEY<CHANGE, "
            'e.g. "step_us>+5%" or "overlap_ratio<-0.1"'
        )
    if match["key"] not in KEYS:
        raise UsageError(
            f"--fail-on: a comparison has no {match['key']!r:.40}; it has {', '.join(KEYS)}"
        )
    relative = match["percent"] is not None
    number = float(match["number"])
    return Limit(
        text=expression.strip(),
        key=match["key"],
        rises=match["operator"] == ">",
        change=number / 100 if relative else number,
        relative=relative,
    )


def check_limit(comparison: Comparison, limit: Limit) -> str | None:
    """Raises an error if a difference is beyond the limit and more than noise.

    Returns:
        Why it is not known whether the difference is beyond the limit; None if it is not.

    Raises:
        ThresholdError: The difference is beyond the limit.
    """
    found = _difference(comparison, limit.key)
    if found.change is None:
        return f"--fail-on {limit.text}: not known, a trace does not give {limit.key}"
    if limit.relative and not found.before:
        return f"--fail-on {limit.text}: not known, {limit.key} is 0 before: give no percentage"
    unit = found.before if limit.relative and found.before else 1.0
    change = found.change / unit
    beyond = change > limit.change if limit.rises else change < limit.change
    if found.verdict in ("less", "more"):
        if beyond:
            text = f"{change:+.1%}" if limit.relative else f"{change:+.6g}"
            raise ThresholdError(
                f"--fail-on {limit.text}: {limit.key} changed by {text}, "
                f"with {comparison.level:.0%} confidence more than noise"
            )
        return None
    if found.verdict == "same":
        return None
    if found.low is not None and found.high is not None:
        excluded = (
            found.high <= limit.change * unit if limit.rises else found.low >= limit.change * unit
        )
        if excluded:
            return None
    return f"--fail-on {limit.text}: not known whether {limit.key} changed by so much; " + (
        comparison.undecided or "more runs a side (--with) would decide it"
    )


def _difference(comparison: Comparison, key: str) -> Difference:
    if key == "rank_step_us":
        return comparison.rank_step_us
    rows = (comparison.step_us, *comparison.shares, *comparison.critical_path)
    return next(row for row in rows if row.name in (key, key.removesuffix("_us")))
