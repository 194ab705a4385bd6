"""Overlap and breakdown by the definitions of Holistic Trace Analysis, for comparison.

The import of Kineto files computes the figures from the times that stand in the files, see
`ddltrace.analyzer.importers.kineto.hta_figures`; this module reads and shows them. On files with
one profiler step, whole microseconds and no synchronization records on streams, ours give the
same overlap ratio, idle, compute and span. Elsewhere they differ on purpose: ours keep every
step, kernels without a recorded launch and fractions of microseconds, and do not count
synchronization records as work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.analyzer.importers.kineto.hta_figures import HTA_LABEL, HtaBreakdown
from ddltrace.tracer.errors import UsageError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace


def hta_breakdown(trace: Trace) -> list[HtaBreakdown]:
    """Computes HTA's overlap and temporal breakdown of every rank with device work.

    Args:
        trace: A trace imported from Kineto files.

    Returns:
        One entry per rank that has device work in the window that HTA looks at. A rank with
        several files has none: HTA reads one file per rank.

    Raises:
        UsageError: The trace was not read from Kineto files, or by an older version.
    """
    if trace.run.source != "kineto":
        raise UsageError(
            f"{trace.name} is no trace of torch.profiler (Kineto), which HTA's definitions are "
            "for: leave out --definitions hta"
        )
    figures = trace.run.labels.get(HTA_LABEL)
    if not isinstance(figures, dict):
        raise UsageError(
            f"{trace.name} was imported by a version of ddltrace that did not keep the figures by "
            "HTA's definitions: import its Kineto files again"
        )
    return [HtaBreakdown(rank, *figures[str(rank)]) for rank in trace.ranks if str(rank) in figures]


def by_hta(document: dict[str, Any], breakdown: list[HtaBreakdown]) -> dict[str, Any]:
    """The object of ``analyze --json`` with HTA's values in the ranks' rows.

    Args:
        document: The result of `ddltrace.analyzer.model.Analysis.to_json`.
        breakdown: HTA's values; a rank that has none gets null.
    """
    found = {each.rank: each for each in breakdown}
    rows = [row | _json_values(found.get(row["rank"])) for row in document["ranks"]]
    return document | {"definitions": "hta", "ranks": rows}


def _json_values(values: HtaBreakdown | None) -> dict[str, float | None]:
    if values is None:
        return dict.fromkeys(("overlap_ratio", "idle_us", "compute_us", "span_us"))
    overlap = values.overlap_percent
    return {
        "overlap_ratio": None if overlap is None else overlap / 100,
        "idle_us": values.idle_us,
        "compute_us": values.compute_us,
        "span_us": values.kernel_time_us,
    }


def render_breakdown(breakdown: list[HtaBreakdown]) -> str:
    """A table of HTA's values, in its own units."""
    title = "Ranks by the definitions of HTA 0.5.0 (all that stands above is by ours)"
    if not breakdown:
        return f"{title}\n  no rank has device work in the window that HTA looks at"
    header = ["rank", "overlap %", "idle us", "compute us", "kernel_time us"]
    rows = [
        [
            str(each.rank),
            NOT_KNOWN if each.overlap_percent is None else f"{each.overlap_percent:.2f}",
            f"{each.idle_us:.0f}",
            f"{each.compute_us:.0f}",
            f"{each.kernel_time_us:.0f}",
        ]
        for each in breakdown
    ]
    return "\n".join([title, *render(header, rows)])
