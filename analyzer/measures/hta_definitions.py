"""Overlap and breakdown by the definitions of Holistic Trace Analysis, for comparison.

The import of Kineto files computes the figures from the times that stand in the files, see
`ddltrace.analyzer.importers.kineto.hta_figures`; this module reads and shows them. On files with
one profiler step, whole microseconds and no synchronization records on streams, ours give the
same overlap ratio, idle, compute and span. Elsewhere they differ on purpose: ours keep every
step, kernels without a recorded launch and fractions of microseconds, and do not count
synchronization records as work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable
from ddltrace.analyzer.importers.kineto.hta_figures import (
    HTA_LABEL,
    HTA_SERIES_LABEL,
    HTA_STREAMS_LABEL,
    HtaBreakdown,
)
from ddltrace.analyzer.importers.kineto.hta_series import Series, from_text
from ddltrace.tracer.errors import TraceError, UsageError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_DESCRIBED: Final = ("count", "mean", "std", "min", "p25", "p50", "p75", "max")
_MAX_ROWS: Final = 32


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
            f"{trace.name} is not a trace of torch.profiler (Kineto), which HTA's definitions are "
            "for: leave out --definitions hta"
        )
    figures = trace.run.labels.get(HTA_LABEL)
    if not isinstance(figures, dict):
        raise UsageError(
            f"{trace.name} was imported by a version of ddltrace that did not keep the figures by "
            "HTA's definitions: import its Kineto files again"
        )
    return [HtaBreakdown(rank, *figures[str(rank)]) for rank in trace.ranks if str(rank) in figures]


def by_hta(
    document: dict[str, Any], breakdown: list[HtaBreakdown], tables: HtaTables
) -> dict[str, Any]:
    """The object of ``analyze --json`` with HTA's values in the ranks' rows.

    Args:
        document: The result of `ddltrace.analyzer.model.Analysis.to_json`.
        breakdown: HTA's values; a rank that has none gets null.
        tables: HTA's tables of streams and copies, which become the entry ``hta``.
    """
    found = {each.rank: each for each in breakdown}
    rows = [row | _json_values(found.get(row["rank"])) for row in document["ranks"]]
    return document | {"definitions": "hta", "ranks": rows, "hta": tables._asdict()}


class HtaTables(NamedTuple):
    """HTA's tables of streams and copies, over all ranks; rows as in the JSON output.

    Attributes:
        idle_time: Idle time of each stream by cause, microseconds (``get_idle_time_breakdown``).
        queue_length: Works launched and not begun on each stream (``get_queue_length_summary``).
        memory_bandwidth: Bandwidth by kind of copy, GB/s (``get_memory_bw_summary``).
    """

    idle_time: list[dict[str, Any]]
    queue_length: list[dict[str, Any]]
    memory_bandwidth: list[dict[str, Any]]


def hta_tables(trace: Trace) -> HtaTables:
    """HTA's tables of streams and copies; empty for a trace imported by an older version."""
    label = trace.run.labels.get(HTA_STREAMS_LABEL)
    stored = label if isinstance(label, dict) else {}
    found = HtaTables([], [], [])
    for rank in trace.ranks:
        tables = stored.get(str(rank)) or {}
        for stream, (host, kernel, other) in tables.get("idle", {}).items():
            causes = {"host_wait_us": host, "kernel_wait_us": kernel, "other_us": other}
            found.idle_time.append({"rank": rank, "stream": int(stream), **causes})
        for stream, values in tables.get("queue", {}).items():
            figures = dict(zip(_DESCRIBED, values, strict=True))
            found.queue_length.append({"rank": rank, "stream": int(stream), **figures})
        for name, values in tables.get("bandwidth", {}).items():
            figures = dict(zip(_DESCRIBED, values, strict=True))
            found.memory_bandwidth.append({"rank": rank, "name": name, **figures})
    return found


def hta_series(trace: Trace, kind: str) -> list[tuple[int, str, Series]]:
    """HTA's time series; empty for traces of other formats and of older versions.

    Args:
        trace: A trace imported from Kineto files.
        kind: ``queue`` (``get_queue_length_time_series``) or ``bandwidth``
            (``get_memory_bw_time_series``, GB/s).

    Returns:
        Rank, stream or kind of copy, and series; times are microseconds since the first event of
        all ranks.

    Raises:
        TraceError: The trace is damaged.
    """
    label = trace.run.labels.get(HTA_SERIES_LABEL)
    stored = label if isinstance(label, dict) else {}
    found = []
    for rank in trace.ranks:
        tables = stored.get(str(rank))
        series = tables.get(kind) if isinstance(tables, dict) else None
        if isinstance(series, dict):
            if kind == "queue" and not all(str(key).isdecimal() for key in series):
                raise TraceError("run.json is damaged: a stream in HTA's time series has no number")
            found += [(rank, str(key), from_text(text)) for key, text in series.items()]
    return found


def render_tables(tables: HtaTables) -> str:
    """HTA's tables of streams and copies as text; empty if there are none."""
    parts = [
        (
            "Idle time of streams (us), by HTA",
            ["rank", "stream", "host wait", "kernel wait", "other"],
            [[f"{value:.0f}" for value in row.values()] for row in tables.idle_time],
        ),
        (
            "Works launched and not begun, by HTA",
            ["rank", "stream", *_DESCRIBED],
            [[_number(value) for value in row.values()] for row in tables.queue_length],
        ),
        (
            "Bandwidth of copies (GB/s), by HTA",
            ["rank", "copy", *_DESCRIBED],
            [[_number(value) for value in row.values()] for row in tables.memory_bandwidth],
        ),
    ]
    shown = []
    for title, header, rows in parts:
        if rows:
            more = [f"  {len(rows) - _MAX_ROWS} more in --json"] if len(rows) > _MAX_ROWS else []
            shown.append("\n".join([title, *render(header, rows[:_MAX_ROWS]), *more]))
    return "\n\n".join(shown)


def _number(value: Any) -> str:
    if value is None:
        return NOT_KNOWN
    if isinstance(value, str):
        return printable(value)
    return f"{value:.4g}"


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
