"""The overview page: where the time of a trace goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dash import dcc, html

from ddltrace.analyzer.formatting.units import (
    bytes_text,
    printable,
    printable_words,
    share_text,
    time_text,
)
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.sentences import sentences, throughput_of
from ddltrace.dashboard import charts
from ddltrace.dashboard.address import EXPERIMENTS_PATH, Address
from ddltrace.dashboard.widgets import card, empty, graph, notes_box, table, tiles
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.workspace import OpenTrace

_MAX_TENSORS: Final = 12
_MAX_HOSTS: Final = 3
_MAX_FINDINGS: Final = 6

FIGURES: Final[dict[str, Callable[[OpenTrace], go.Figure | None]]] = {
    "steps": lambda opened: figures.step_times(opened.analysis),
    "breakdown": lambda opened: charts.breakdown(opened.breakdowns),
    "overlap": lambda opened: figures.overlap_over_steps(opened.analysis),
    "waits": lambda opened: figures.wait_against_transfer(opened.analysis),
    "stragglers": lambda opened: figures.stragglers(opened.analysis),
    "tensors": lambda opened: charts.exposed_tensors(opened.analysis),
    "critical": lambda opened: figures.critical_parts(opened.analysis),
    "bandwidth": lambda opened: figures.bandwidth_against_size(opened.analysis),
    "traffic": lambda opened: figures.traffic(opened.analysis),
}
"""Name of a figure -> the function that makes it; None if the trace has no data for it."""

_CARDS: Final = (
    ("steps", "Step times", "Each bar is a step's wall time, split along its critical path.", True),
    (
        "breakdown",
        "On each rank",
        "Means per steady step; the parts sum to the rank's step. Alone: without communication.",
        False,
    ),
    ("stragglers", "Stragglers", "Who arrives last, and how late.", False),
    ("overlap", "Overlap over steps", "Shares of each step on a rank, means over ranks.", False),
    ("waits", "Waiting or transferring", "Most of a slow collective can be waiting.", False),
    ("tensors", "Most exposed tensors", "Whose communication holds the step up.", False),
    ("critical", "On the critical path", "The largest parts, means per steady step.", False),
    ("bandwidth", "Bandwidth against size", "Bus bandwidth that each collective reaches.", False),
    ("traffic", "Point-to-point traffic", "Bytes from each rank to each other.", False),
)


def overview_page(opened: OpenTrace, address: Address | None = None) -> Component:
    """The page for one trace.

    Args:
        address: The page's address; findings link from it to the form of the experiments page.

    Raises:
        TraceError: The trace cannot be analyzed.
    """
    analysis = opened.analysis
    cards: list[Any] = []
    for name, title, hint, wide in _CARDS:
        figure = opened.figure(name, FIGURES[name])
        if figure is not None:
            body = graph(name, figure.layout.height)
            cards.append(card(title, body, hint=hint, wide=wide))
        elif name == "stragglers" and len(opened.trace.ranks) > 1:
            cards.append(card(title, html.P("No rank is known to come last.", className="quiet")))
    if analysis.tensors:
        cards.append(_largest_tensors(analysis))
    narrow = [item for item in cards if item.className == "card"]
    if len(narrow) % 2:
        narrow[-1].className = "card wide"  # it would stand beside a gap
    if not cards:
        cards.append(
            empty(
                "Nothing was measured",
                "This trace holds no steps, messages or layers. "
                "Record a training job with: ddltrace run -- torchrun train.py",
            )
        )
    if analysis.findings:
        cards.insert(0, _findings(opened, address))
    return html.Main(
        [_headline(opened), tiles(_numbers(analysis)), html.Div(cards, className="cards")],
        className="page",
    )


def _findings(opened: OpenTrace, address: Address | None) -> Component:
    """What to change, the largest possible saving first, and what would test each change."""
    items = []
    for finding in opened.analysis.findings[:_MAX_FINDINGS]:
        saving = [html.Strong(f"{finding.kind}: ")]
        if finding.has_saving:
            saving = [
                html.Strong(f"up to {time_text(finding.saves_us)} "),
                html.Span(f"({share_text(finding.share)} of the step): "),
            ]
        parts: list[Any] = [
            html.Div([*saving, html.Span(printable(finding.advice))]),
            html.Div(printable(finding.evidence), className="quiet"),
        ]
        if finding.unsure:
            parts.append(
                html.Div("Unsure: below the error of the aligned clocks.", className="quiet")
            )
        if finding.command:
            parts.append(html.Div(html.Code(printable_words(finding.command))))
        if finding.strategies:
            parts.append(
                dcc.Link(
                    "Test it in an experiment",
                    href=(address or Address()).link(
                        EXPERIMENTS_PATH,
                        trace=opened.number,
                        strategies="\n".join(_baseline_first(finding.strategies)),
                        job=f"trace:{opened.number}",
                    ),
                )
            )
        items.append(html.Li(parts))
    return card(
        "What to change",
        html.Ol(items, className="findings"),
        hint="Each saving is an upper bound from a replay without the cause.",
        wide=True,
    )


def _baseline_first(strategies: tuple[str, ...]) -> list[str]:
    """Sorts DistributedDataParallel first, because an experiment compares with its first
    strategy."""
    return ["ddp", *(spec for spec in strategies if spec != "ddp")]


def _headline(opened: OpenTrace) -> Component:
    analysis = opened.analysis
    trace = analysis.trace
    first, *rest = sentences(analysis)
    more = len(trace.hosts) - _MAX_HOSTS
    facts = [
        f"{len(trace.ranks)} of {counted(trace.world_size, 'rank')}",
        counted(trace.steps, "step"),
        counted(trace.events, "event"),
        printable(", ".join(trace.hosts[:_MAX_HOSTS])),
        counted(more, "more host") if more > 0 else "",
        f"level {printable(trace.level)}",
    ]
    children: list[Any] = [
        html.P(" · ".join(fact for fact in facts if fact), className="facts"),
        html.H1(first),
        *(html.P(line, className="lead") for line in rest),
        html.P(
            [
                dcc.Link("Open the timeline", href=f"/timeline?trace={opened.number}"),
                html.Code(printable(" ".join(trace.command)), className="command")
                if trace.command
                else None,
            ],
            className="next",
        ),
    ]
    if opened.notes:
        children.append(notes_box(opened.notes))
    return html.Section(children, className="headline")


def _numbers(analysis: Analysis) -> list[tuple[str, str, str]]:
    summary = analysis.summary
    return [
        (
            "Step, mean",
            time_text(summary.step_us.mean),
            "From the first start to the last end on any rank, steady steps.",
        ),
        ("Step, 95th pct", time_text(summary.step_us.p95), "One step in twenty is slower."),
        (
            "Overlap ratio",
            share_text(summary.overlap_ratio),
            "Share of communication that happens while the rank computes.",
        ),
        (
            "Compute on a rank",
            share_text(summary.compute_share),
            "Share of a step, mean over ranks and steady steps.",
        ),
        (
            "Exposed comm on a rank",
            share_text(summary.exposed_comm_share),
            "Mean share of a step in which the rank communicates and does not compute.",
        ),
        (
            "Waiting on a rank",
            share_text(summary.sync_overhead_share),
            "Mean share of a step in which the rank waits for others and does not compute.",
        ),
        (
            "Idle on a rank",
            share_text(summary.idle_share),
            "Mean share of a step in which the rank neither computes, communicates nor copies.",
        ),
        *(
            (f"{what[0].upper()}{what[1:]}", value, remark)
            for what, value, remark in throughput_of(summary)
        ),
    ]


def _largest_tensors(analysis: Analysis) -> Component:
    rows = sorted(analysis.tensors, key=lambda row: row.bytes, reverse=True)[:_MAX_TENSORS]
    more = len(analysis.tensors) - len(rows)
    return card(
        "Largest tensors",
        table(
            ("tensor", "size", "ready", "enqueued", "complete", "exposed"),
            [
                (
                    html.Span(printable(row.name), title=printable(row.name)),
                    bytes_text(row.bytes),
                    time_text(row.ready_us),
                    time_text(row.enqueue_us),
                    time_text(row.complete_us),
                    time_text(row.exposed_us),
                )
                for row in rows
            ],
        ),
        hint="A gradient's life, from the start of the step"
        + (f"; {more} smaller ones are not shown." if more else "."),
        wide=True,
    )
