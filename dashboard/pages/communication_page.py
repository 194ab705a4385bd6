"""The communication page: traffic between ranks, bandwidth, waiting, and late ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dash import dcc, html

from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.analyzer.report import figures
from ddltrace.analyzer.report.figures import base_figure
from ddltrace.analyzer.report.sentences import communication_text, dimensions_text
from ddltrace.dashboard.pages.collective_events import Collective, Filter, Selection, select
from ddltrace.dashboard.pages.figure_cards import Draw, figure_cards
from ddltrace.dashboard.pages.sorted_table import Column, sorted_table, time_column
from ddltrace.dashboard.timeline.links import timeline_link
from ddltrace.dashboard.widgets import card, empty, notes_box, table
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from dash.development.base_component import Component

    from ddltrace.analyzer.measures.collectives import P2PRow
    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.address import Address
    from ddltrace.dashboard.workspace import OpenTrace

PATH: Final = "/communication"
_STATES: Final = {
    "complete": "",
    "open": "It did not complete on some rank.",
    "partial": "The record of a member is missing: it never came, or its record was lost.",
    "mismatch": "Its members disagree on operation or size, or one has it twice.",
}
_MAX_COLLECTIVES: Final = 10_000


def size_distribution(analysis: Analysis) -> go.Figure | None:
    """Number of messages of each size, by operation."""
    bins = analysis.message_sizes
    if not bins:
        return None
    figure = base_figure(height=300)
    edges = sorted({row.bytes_from for row in bins})
    names = [bytes_text(edge) for edge in edges]
    for number, op in enumerate(sorted({row.op for row in bins})):
        counts = {row.bytes_from: row.count for row in bins if row.op == op}
        figure.add_bar(
            x=names,
            y=[counts.get(edge, 0) for edge in edges],
            name=figures.label(op),
            meta={"role": f"series-{number % 6}"},
        )
    figure.update_layout(barmode="stack", showlegend=True)
    figure.update_xaxes(title="size from", type="category")
    figure.update_yaxes(title="messages")
    return figure


def host_traffic(opened: OpenTrace) -> go.Figure | None:
    """Bytes from each host to each other; None where all ranks are on one host."""
    hosts = {info.rank: info.host for info in opened.trace.run.ranks if info.host}
    names = sorted(set(hosts.values()))
    if len(names) < 2:
        return None
    place = {name: number for number, name in enumerate(names)}
    matrix = np.zeros((len(names), len(names)))
    for row in opened.analysis.traffic:
        if row.src in hosts and row.dst in hosts:
            matrix[place[hosts[row.src]], place[hosts[row.dst]]] += row.bytes
    if not matrix.any():
        return None
    figure = base_figure(height=140 + 34 * min(len(names), 16))
    labels = [figures.label(name) for name in names]
    figure.add_heatmap(
        z=matrix,
        x=labels,
        y=labels,
        meta={"role": "scale"},
        customdata=[[bytes_text(int(value)) for value in row] for row in matrix],
        hovertemplate="%{y} to %{x}: %{customdata}<extra></extra>",
        showscale=False,
    )
    figure.update_xaxes(title="to", type="category")
    figure.update_yaxes(title="from", type="category", autorange="reversed")
    return figure


FIGURES: Final[dict[str, Draw]] = {
    "comm-traffic": lambda opened, _: figures.traffic(opened.analysis),
    "comm-all-to-all": lambda opened, _: figures.all_to_all(opened.analysis),
    "comm-hosts": lambda opened, _: host_traffic(opened),
    "comm-fits": lambda opened, _: figures.cost_fits(opened.analysis),
    "comm-bandwidth": lambda opened, _: figures.bandwidth_against_size(opened.analysis),
    "comm-waits": lambda opened, _: figures.wait_against_transfer(opened.analysis),
    "comm-sizes": lambda opened, _: size_distribution(opened.analysis),
    "comm-arrivals": lambda opened, _: figures.stragglers(opened.analysis),
}

_CARDS: Final = (
    ("comm-waits", "Waiting and transfer", "Time until the last rank arrives, and after it."),
    ("comm-traffic", "Traffic between ranks", "Bytes from each rank to each other."),
    (
        "comm-all-to-all",
        "All-to-alls",
        "Bytes from each rank to each rank, where the calls give them.",
    ),
    ("comm-hosts", "Traffic between hosts", "Bytes from each host to each other."),
    (
        "comm-fits",
        "Time against size",
        "Points: medians of one size. Lines: latency + size / bandwidth, fitted.",
    ),
    (
        "comm-bandwidth",
        "Bandwidth against size",
        "Bus bandwidth that each collective reaches. Dashed: the fitted limit of the links.",
    ),
    ("comm-sizes", "Sizes", "Number of messages by size."),
    ("comm-arrivals", "Arrival order", "Ranks that arrive last, and by how much."),
)


def communication_page(opened: OpenTrace, address: Address) -> Component:
    """The page for one trace.

    Raises:
        TraceError: The trace cannot be analyzed.
    """
    analysis = opened.analysis
    cards = figure_cards(opened, address, FIGURES, _CARDS)
    wanted = Filter.of(address)
    found = select(
        opened.analyzed,
        opened.trace.origin_ns,
        wanted,
        sort=address.text("sort"),
        limit=_MAX_COLLECTIVES,
    )
    if not cards and not found.total:
        return html.Main(
            empty(
                "No communication",
                "This trace has no collectives, sends or receives.",
            ),
            className="page",
        )
    if cards:
        cards[0].className = "card wide"
        if len(cards) % 2 == 0:
            cards[-1].className = "card wide"
    joining, pairs = analysis.joining, sum(row.count for row in analysis.p2p)
    head: list[Any] = [
        html.H1(
            f"{counted(joining.collectives, 'collective')}, "
            f"{counted(pairs, 'message')} between pairs of ranks"
        ),
        html.P(communication_text(analysis), className="lead"),
        _limits(analysis),
    ]
    if opened.notes:
        head.append(notes_box(opened.notes))
    parts: list[Any] = [html.Section(head, className="headline")]
    parts.append(html.Div(cards, className="cards"))
    if analysis.compared_dimensions():
        parts.append(_dimensions(analysis))
    if found.total:
        parts.append(_all_collectives(opened, found, wanted, address))
    if analysis.p2p:
        parts.append(_pairs(analysis, address))
    return html.Main(parts, className="page")


def _limits(analysis: Analysis) -> Component:
    """The fitted latency and bandwidth of the operation with the most samples."""
    fitted = [fit for fit in analysis.cost_fits if fit.latency_us is not None]
    if not fitted:
        return html.P(
            "The sizes of the collectives are too few to separate latency from bandwidth.",
            className="quiet",
        )
    fit = max(fitted, key=lambda row: row.samples)
    bandwidth = "" if fit.busbw_gbps is None else f", {fit.busbw_gbps:.3g} Gbit/s of bus bandwidth"
    return html.P(
        f"{printable(fit.op)} of {fit.group_size} ranks: latency {time_text(fit.latency_us)}"
        f"{bandwidth} for large sizes, fitted on {fit.samples:,} samples of {fit.sizes} sizes.",
        className="quiet",
    )


def _all_collectives(
    opened: OpenTrace, found: Selection, wanted: Filter, address: Address
) -> Component:

    def timeline(row: Collective) -> str:
        return timeline_link(opened.number, row.first_ns, row.end_ns)

    columns: list[Column[Collective]] = [
        Column(
            "op",
            "collective",
            lambda row: printable(row.title),
            lambda row: row.title,
            href=timeline,
        ),
        Column("group", "group", lambda row: printable(row.group), lambda row: row.group),
        Column(
            "step",
            "step",
            lambda row: NOT_KNOWN if row.step is None else str(row.step),
            lambda row: row.step,
        ),
        Column("size", "size", lambda row: bytes_text(row.bytes), lambda row: row.bytes, "bytes"),
        Column(
            "ranks", "ranks", _ranks, lambda row: row.ranks, hint=lambda row: _STATES[row.state]
        ),
        time_column("skew", "arrival skew", lambda row: row.skew_us),
        Column(
            "last",
            "last rank",
            lambda row: NOT_KNOWN if row.last_rank is None else str(row.last_rank),
            lambda row: row.last_rank,
        ),
        time_column("late", "its lateness", lambda row: row.lateness_us),
        time_column("wait", "wait", lambda row: row.wait_us),
        time_column("transfer", "transfer", lambda row: row.transfer_us),
    ]
    return card(
        "All collectives",
        _filters(found, wanted, address),
        sorted_table(
            found.rows,
            columns,
            address,
            PATH,
            name="collectives",
            text_columns=2,
            total=found.admitted,
        ),
        hint=f"{found.admitted:,} of {found.total:,}. A click on a name opens the timeline there; "
        "wait is summed over the ranks.",
        wide=True,
    )


def _ranks(row: Collective) -> str:
    """How many ranks were seen, and the state if it is not complete."""
    return str(row.ranks) if row.state == "complete" else f"{row.ranks}, {row.state}"


def _filters(found: Selection, wanted: Filter, address: Address) -> Component:
    """Links that narrow the table to one operation, group, last rank or state."""
    lines = []
    for key, title in (
        ("op", "operation"),
        ("group", "group"),
        ("rank", "last rank"),
        ("state", "state"),
    ):
        values = found.choices[key]
        if len(values) < 2:
            continue
        chosen = getattr(wanted, key)
        links: list[Any] = [
            dcc.Link(
                "all",
                href=address.link(PATH, **{key: None}),
                className="filter here" if chosen is None else "filter",
            )
        ]
        links += [
            dcc.Link(
                printable(value),
                href=address.link(PATH, **{key: value}),
                className="filter here" if chosen == value else "filter",
            )
            for value in values[:40]
        ]
        lines.append(html.Div([html.Span(title), *links], className="filters"))
    return html.Div(lines)


def _dimensions(analysis: Analysis) -> Component:
    return card(
        "Communication by parallel dimension",
        table(
            ("dimension", "groups", "exposed", "waiting", "transfer", "messages", "bytes"),
            [
                (
                    row.dimension,
                    printable(", ".join(row.groups)),
                    time_text(row.exposed_us),
                    time_text(row.wait_us),
                    time_text(row.transfer_us),
                    f"{row.messages:.3g}",
                    bytes_text(row.bytes),
                )
                for row in analysis.compared_dimensions()
            ],
            text_columns=2,
        ),
        hint=dimensions_text(analysis.summary),
        wide=True,
    )


def _pairs(analysis: Analysis, address: Address) -> Component:
    columns: list[Column[P2PRow]] = [
        Column("pair-from", "from", lambda row: f"rank {row.src}", lambda row: row.src),
        Column("pair-to", "to", lambda row: f"rank {row.dst}", lambda row: row.dst),
        Column("pair-count", "messages", lambda row: f"{row.count:,}", lambda row: row.count),
        Column(
            "pair-bytes", "bytes", lambda row: bytes_text(row.bytes), lambda row: row.bytes, "bytes"
        ),
        time_column("pair-wait", "wait", lambda row: row.wait_us),
        time_column("pair-transfer", "transfer", lambda row: row.transfer_us),
        Column(
            "pair-alone",
            "without their other side",
            lambda row: share_text(row.unmatched / row.count) if row.unmatched else NOT_KNOWN,
            lambda row: row.unmatched / row.count if row.unmatched else None,
            "0 to 1",
        ),
    ]
    return card(
        "Pairs of ranks",
        sorted_table(analysis.p2p, columns, address, PATH, name="pairs", text_columns=2),
        hint="Sends and receives; waiting and transfer are those of the receiver, summed.",
        wide=True,
    )
