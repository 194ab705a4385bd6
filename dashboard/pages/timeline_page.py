"""The timeline page, and the panel with details of the selected event."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from dash import html

from ddltrace.analyzer.formatting.units import instant_text, printable, share_text, time_text
from ddltrace.dashboard.pages.event_details import Details, Part, describe
from ddltrace.dashboard.pages.path_panel import describe_piece
from ddltrace.dashboard.stored.marks import load_marks
from ddltrace.dashboard.timeline.component import Timeline
from ddltrace.dashboard.timeline.path_lane import NO_RANK
from ddltrace.dashboard.timeline.range_summary import RangeRow, summarize
from ddltrace.dashboard.widgets import LONGEST_TABLE, GridColumn, grid, table
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from ddltrace.dashboard.workspace import OpenTrace

_MAX_PARTS: Final = 64
_MAX_LAUNCHED: Final = 16
_MAX_NAMES: Final = 2000


def timeline_page(opened: OpenTrace) -> Component:
    """The page for one trace."""
    return html.Main(
        [
            Timeline(
                id="timeline",
                trace=opened.number,
                link="v",
                marks=load_marks(opened.trace),
            ),
            html.Aside(id="details", className="details", **{"aria-live": "polite"}),
        ],
        className="page-timeline",
    )


def event_panel(opened: OpenTrace, rank: int, event: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The panel for an event, and the intervals to connect on the timeline.

    Raises:
        TraceError: The trace has no such event.
    """
    details = describe(opened, rank, event)
    places = {part.rank: place(opened, part.rank, part.event) for part in details.parts}
    flow = [
        where | {"last": part.is_last}
        for part in details.parts
        if (where := places[part.rank]) is not None
    ]
    if not flow and (own := place(opened, rank, event)) is not None:
        flow = [own | {"last": False}]
    flow = _with_launch(opened, details, flow)
    children: list[Any] = [
        html.Header([html.Span(details.kind, className="kind"), html.H2(details.title)]),
        html.Dl([cell for fact in details.facts for cell in _fact(*fact)]),
    ]
    if len(details.parts) + len(details.missing_ranks) > 1:
        children += [html.H3("On every rank"), *_parts(details, places)]
    children += _launch(details)
    if details.tensors:
        children += [html.H3(f"Tensors ({details.num_tensors:,})"), _tensors(details)]
    return children, flow


def _with_launch(
    opened: OpenTrace, details: Details, flow: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Adds a call and what it launched, between which the timeline draws arrows."""
    launch = details.launch
    if launch is None:
        return flow
    found = {(part["rank"], part["event"]): part for part in flow}
    works = [work.event for work in launch.works[:_MAX_LAUNCHED]]
    if details.event != launch.call:
        works = [details.event]
    for event, mark in ((launch.call, "call"), *((work, "launched") for work in works)):
        key = (details.rank, event)
        if key not in found and (where := place(opened, *key)) is not None:
            found[key] = where | {"last": False}
        if key in found:
            found[key][mark] = True
    return list(found.values())


def _launch(details: Details) -> list[Component]:
    """The call that launched an event, or what a call launched, each a link."""
    launch = details.launch
    if launch is None:
        return []
    if details.event != launch.call:
        lead = time_text((details.start_ns - launch.start_ns) / 1e3)
        text = f"{lead} before: {launch.title}"
        return [html.H3("Launched by"), _goto(details.rank, launch.call, text)]
    lines = [
        _goto(
            details.rank,
            work.event,
            f"{time_text((work.start_ns - launch.start_ns) / 1e3)} later: {work.title}",
        )
        for work in launch.works[:_MAX_LAUNCHED]
    ]
    if len(launch.works) > len(lines):
        lines.append(html.P(f"{len(launch.works) - len(lines):,} more are not shown."))
    return [html.H3("Launched"), *lines]


def _goto(rank: int, event: int, text: str) -> Component:
    """A button that shows an event on the timeline."""
    place = {"type": "goto", "rank": rank, "event": event}
    return html.Button(text, id=place, title=text, className="tl-button goto")


def piece_panel(opened: OpenTrace, number: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The panel for a piece of a critical path, with the event that contains it.

    Raises:
        ValueError: There is no such piece.
    """
    details = describe_piece(opened, number)
    children: list[Any] = [
        html.Header([html.Span("critical path", className="kind"), html.H2(details.title)]),
        html.Dl([cell for fact in details.facts for cell in _fact(*fact)]),
    ]
    own = place(opened, NO_RANK, number)
    flow = [] if own is None else [own | {"last": False}]
    if details.event is None:
        return children, flow
    of_event, flow_of_event = event_panel(opened, details.rank, details.event)
    # Otherwise a list of all ranks contains the link.
    if len({part["rank"] for part in flow_of_event}) <= 1:
        children.append(_goto(details.rank, details.event, f"Show it on rank {details.rank}"))
    return [*children, html.Hr(), *of_event], flow + flow_of_event


def range_panel(
    opened: OpenTrace, start_ns: int, end_ns: int, ranks: Collection[int] = ()
) -> list[Any]:
    """The panel for a measured range: how busy each rank is in it, and what ran.

    Args:
        start_ns: Where the range begins, since the trace's first event.
        end_ns: Where it ends.
        ranks: Ranks of the rows that are shown; empty for all.
    """
    chosen = [rank for rank in opened.trace.ranks if not ranks or rank in ranks]
    edges = np.array([start_ns, end_ns], dtype=np.int64)
    width = max(1, end_ns - start_ns)
    rows = []
    for rank in chosen:
        compute, comm = opened.timeline.busy[rank]
        shares = [float(np.diff(busy.covered_until(edges))[0]) / width for busy in (compute, comm)]
        rows.append((f"rank {rank}", *(share_text(share) for share in shares)))
    return [
        html.Header([html.Span("range", className="kind"), html.H2(time_text(width / 1e3))]),
        html.Dl(
            [*_fact("From", instant_text(start_ns / 1e3)), *_fact("To", instant_text(end_ns / 1e3))]
        ),
        html.H3("Busy in this range"),
        table(("rank", "compute", "communication"), rows),
        html.H3("What ran in it"),
        _what_ran(summarize(opened.timeline, start_ns, end_ns, chosen), width * len(chosen)),
    ]


def _what_ran(rows: list[RangeRow], whole_ns: int) -> Component:
    """The events of a range by kind and name; shares are of the time of the ranks."""
    cells = [
        (
            (row.name or row.kind, printable(row.name or row.kind), None),
            (row.total_ns / 1e3, time_text(row.total_ns / 1e3), None),
            (row.total_ns / whole_ns, share_text(row.total_ns / whole_ns), None),
            (row.count, f"{row.count:,}", None),
            (row.total_ns / row.count / 1e3, time_text(row.total_ns / row.count / 1e3), None),
            (row.kind, row.kind, None),
            (row.ranks, str(row.ranks), None),
        )
        for row in rows[:_MAX_NAMES]
    ]
    columns = (
        GridColumn("name"),
        GridColumn("total", "µs"),
        GridColumn("share", "0 to 1"),
        GridColumn("count"),
        GridColumn("mean", "µs"),
        GridColumn("kind"),
        GridColumn("ranks"),
    )
    if len(cells) > LONGEST_TABLE:
        return grid("range", columns, cells)
    heads = [column.title for column in columns]
    return table(heads, [[text for _, text, _ in row] for row in cells])


def place(opened: OpenTrace, rank: int, event: int) -> dict[str, Any] | None:
    """The position of an event on the timeline; for `NO_RANK`, of a piece of a critical path."""
    found = opened.row_of_event(rank, event)
    if found is None:
        return None
    number, position = found
    index = opened.row(number).index
    at = np.array([position], dtype=np.int64)
    return {
        "rank": rank,
        "row": number,
        "event": event,
        "start": int(index.start[position]),
        "end": int(index.end(at)[0]),
    }


def _fact(name: str, value: str) -> list[Component]:
    return [html.Dt(name), html.Dd(value)]


def _parts(details: Details, places: dict[int, dict[str, Any] | None]) -> list[Component]:
    """All ranks of a message: a small chart of waiting and transfer, each a link to its event."""
    parts = details.parts[:_MAX_PARTS]
    first = min((part.arrival_ns for part in parts), default=0)
    last = max((part.end_ns or part.arrival_ns for part in parts), default=first)
    rows = [_part(part, places[part.rank], first, max(1, last - first)) for part in parts]
    keys = {"wait for the last rank": "wait", "transfer": "transfer"}
    if any(_is_whole(part) for part in parts):
        keys = {"waiting and transfer together": "whole"}
    lines: list[Component] = [
        html.Div(rows, className="parts"),
        html.P(
            [html.Span(text, className=f"tl-key key-{key}") for text, key in keys.items()],
            className="parts-legend",
        ),
    ]
    latest = next((part for part in details.parts if part.is_last), None)
    if latest is not None and latest.lateness_ns > 0:
        lines.append(
            html.P(
                f"Rank {latest.rank} arrived last, {time_text(latest.lateness_ns / 1e3)} "
                "after the median arrival of the others."
            )
        )
    if more := len(details.parts) - len(parts):
        lines.append(html.P(f"{counted(more, 'more rank', 'is')} not shown."))
    if details.missing_ranks:
        shown = ", ".join(map(str, details.missing_ranks[:16]))
        lines.append(html.P(f"Nothing is known of rank {shown}.", className="warning"))
    return lines


def _is_whole(part: Part) -> bool:
    """Whether arrival and end of a part are known, but not its waiting."""
    return part.wait_ns is None and part.end_ns is not None


def _part(part: Part, where: dict[str, Any] | None, first: int, span: int) -> Component:
    def percent(ns: float) -> str:
        return f"{100 * ns / span:.2f}%"

    lengths: list[tuple[str, int | None]] = [
        ("wait", part.wait_ns),
        ("transfer", part.transfer_ns),
    ]
    if _is_whole(part):
        lengths = [("whole", (part.end_ns or 0) - part.arrival_ns)]
    bars: list[Component] = []
    at = part.arrival_ns - first
    for kind, length in lengths:
        if length is not None and length > 0:
            style = {"left": percent(at), "width": percent(length)}
            bars.append(html.Span(className=f"bar {kind}", style=style))
            at += length
    texts = [time_text(length / 1e3) for _, length in lengths if length is not None]
    if len(texts) < len(lengths):
        texts.append("end not known" if part.is_completed else "not completed")
    return html.Button(
        [
            html.Span(f"rank {part.rank}", className="who"),
            html.Span(bars, className="bars"),
            html.Span(" + ".join(texts), className="times"),
        ],
        id={"type": "goto", "rank": part.rank, "event": part.event},
        className="part last" if part.is_last else "part",
        title="Show this rank's part on the timeline",
        disabled=where is None,
    )


def _tensors(details: Details) -> Component:
    rows = [(html.Span(t.name, title=t.name), t.shape, t.size) for t in details.tensors]
    if details.num_tensors > len(rows):
        rows.append((html.Em(f"{details.num_tensors - len(rows):,} more"), "", ""))
    return table(("name", "shape", "size"), rows, text_columns=2)
