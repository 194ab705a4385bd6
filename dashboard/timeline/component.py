"""The Dash side of the timeline component, which is implemented in ``assets/timeline.js``."""

from __future__ import annotations

from typing import Any

from dash.development.base_component import Component


class Timeline(Component):
    """A trace's timeline on a canvas, fed by the routes under ``/api/``.

    Keyword Args:
        id: Dash id.
        trace: Number of the trace.
        link: Key under which the address keeps the view; without it, the address does not.
        sync: Timelines with the same value show the same window of time.
        window: The interval to show at first, in ns; the whole trace without it.
        sync_follower: Whether keys go to the other synchronized timelines unless this has focus.
        shift: Time in ns that stands at 0 of the axis of synchronized timelines.
        compact: Whether to leave out what needs a panel; synchronized timelines measure ranges.
        selected: The event that the user clicked: ``{rank, row, event}``.
        range: The interval that the user measured: start and end in ns.
        shown: The interval on the screen, in ns; only of synchronized timelines, of the first one.
        ranks: The ranks whose rows were shown when it was measured, if rows were filtered.
        marks: Times with a note that the user marked: ``[{t, text}]``, t in ns.
        unsaved: Why marks could not be kept; empty if they are.
        flow: Intervals to connect: ``[{row, event, start, end, last}]``; of a launch, the call has
            ``call`` and what it launched ``launched``.
        goto: An interval to show: ``{rank, row, event, start, end}``.
    """

    _namespace = "ddltrace_dashboard"
    _type = "Timeline"
    _children_props: list[str] = []  # noqa: RUF012 - Dash reads it from the class
    _base_nodes: list[str] = []  # noqa: RUF012
    _prop_names = (
        "id",
        "trace",
        "link",
        "sync",
        "sync_follower",
        "shift",
        "window",
        "compact",
        "selected",
        "range",
        "shown",
        "ranks",
        "marks",
        "unsaved",
        "flow",
        "goto",
    )
    _valid_wildcard_attributes: tuple[str, ...] = ()
    available_properties = _prop_names
    available_wildcard_properties: tuple[str, ...] = ()

    def __init__(self, **props: Any) -> None:
        super().__init__(**props)
