"""Formats the lead of workers over each other, for each strategy, as rows of text."""

from __future__ import annotations

from typing import Any, Final

from ddltrace.analyzer.formatting.units import NOT_KNOWN, share_text
from ddltrace.experiments.harness.results import Results
from ddltrace.experiments.harness.row import Row

HEADS: Final = (
    ("", "strategy"),
    ("staleness", "mean"),
    ("", "max"),
    ("", "distribution"),
    ("blocked", "ms"),
    ("updates", "dropped"),
    ("loss over", "baseline"),
)
_SHOWN: Final = 3


def clocked(results: Results) -> list[Row]:
    """The rows whose traces have clocks of their workers."""
    return [row for row in results.rows if row.synchronization is not None]


def cells(row: Row, baseline: Row | None) -> list[str]:
    """One row, columns as in `HEADS`, without the strategy's name.

    Args:
        row: A row of `clocked`.
        baseline: The row to whose loss it is compared.
    """
    found = row.synchronization or {}
    staleness, updates = found["staleness"], found["updates"]
    blocked = found["blocked_us"]
    return [
        NOT_KNOWN if staleness is None else f"{staleness['mean']:.2f}",
        NOT_KNOWN if staleness is None else str(staleness["max"]),
        NOT_KNOWN if staleness is None else distribution_text(staleness),
        NOT_KNOWN if blocked is None else f"{blocked / 1e3:.2f}",
        NOT_KNOWN if not updates else str(updates["dropped"]),
        _loss(row, baseline),
    ]


def distribution_text(staleness: dict[str, Any]) -> str:
    """The most frequent values of a distribution with their shares, and how many there are more."""
    counts = {int(age): count for age, count in staleness["counts"].items()}
    total = sum(counts.values())
    often = sorted(sorted(counts, key=lambda age: -counts[age])[:_SHOWN])
    text = ", ".join(f"{age}: {share_text(counts[age] / total)}" for age in often)
    return text if len(counts) <= _SHOWN else f"{text}, ..."


def explanations(results: Results) -> list[str]:
    """How to read the columns; nothing if no row has them."""
    rows = clocked(results)
    if not rows:
        return []
    lines = [
        "staleness: how many steps the oldest missing update is behind the step that a read "
        "begins; between peers, how many steps two ranks that average are apart.",
        "blocked: for how long a read was held back, per step; between peers, how long a rank "
        "waited for others.",
    ]
    for row in rows:
        bounds = (row.synchronization or {})["bounds"]
        if bounds and bounds["min"] != bounds["max"]:
            lines.append(
                f"{row.strategy}: reads were admitted by bounds {bounds['min']} to "
                f"{bounds['max']}, {bounds['last']} at the end."
            )
    return lines


def _loss(row: Row, baseline: Row | None) -> str:
    if baseline is None or row is baseline:
        return "baseline" if baseline is not None else NOT_KNOWN
    if row.train_loss is None or baseline.train_loss is None:
        return NOT_KNOWN
    return f"{row.train_loss - baseline.train_loss:+.4f}"
