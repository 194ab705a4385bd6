"""Addresses that open the timeline at a place: what ``assets/timeline_scene.js`` reads."""

from __future__ import annotations

from urllib.parse import quote

_MARGIN = 0.15


def timeline_link(
    trace: int, start_ns: int, end_ns: int, *, query: str = "", pinned: int | None = None
) -> str:
    """The address of the timeline page, zoomed to an interval.

    Args:
        trace: Number of the trace in this dashboard.
        start_ns: Start of the interval, from the trace's first event.
        query: What the search box contains.
        pinned: A rank that is pinned to the top.
    """
    margin = max(1, round(_MARGIN * max(1, end_ns - start_ns)))
    state = f"t:{max(0, start_ns - margin)}_{end_ns + margin}"
    if pinned is not None:
        state += f"~r:{pinned}___"
    if query:
        state += "~q:" + quote(quote(query, safe="").replace("~", "%7E"), safe="")
    return f"/timeline?trace={trace}#v={state}"
