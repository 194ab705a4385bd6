"""The dashboard's font, and the colors of its figures."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.report import palette
from ddltrace.analyzer.report.palette import DEFAULT_THEME, ROLES, SURFACES, Theme

if TYPE_CHECKING:
    import plotly.graph_objects as go

FONT: Final = (
    'Inter, "Segoe UI", system-ui, -apple-system, "Helvetica Neue", "Liberation Sans", Arial, '
    "sans-serif"
)

GRAPH_CONFIG: Final = {
    "displaylogo": False,
    "responsive": True,
    # Otherwise a button of every figure uploads its data to a cloud service.
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}


_MODE_BAR_WIDTH: Final = 40


def parse_theme(value: object) -> Theme:
    """The theme that a browser requests; light for unknown values."""
    return "dark" if value == "dark" else DEFAULT_THEME


def style_sheet() -> str:
    """The font and the palette as CSS variables."""
    return f":root {{ --font: {FONT}; }}\n{palette.style_sheet()}"


def dress(figure: go.Figure, theme: Theme) -> go.Figure:
    """Colors a figure whose traces name their roles in ``meta``.

    Args:
        figure: The figure; it is not changed.
        theme: Light or dark.

    Returns:
        A colored copy.
    """
    figure = copy.deepcopy(figure)
    roles, surfaces = ROLES[theme], SURFACES[theme]
    for trace in figure.data:
        role = (trace.meta or {}).get("role", "muted")
        if role == "scale":
            trace.colorscale = [[0, roles["scale-low"]], [1, roles["scale-high"]]]
            continue
        trace.marker.color = roles[role]
        if trace.type == "bar":
            trace.marker.line.width = 0
            trace.insidetextfont.color = palette.ink_on(roles[role])
            trace.outsidetextfont.color = surfaces["ink"]
        else:
            trace.line.color = roles[role]
        if trace.type == "box":
            trace.fillcolor = "rgba(128, 128, 128, 0.12)"  # the points are drawn on top
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": surfaces["ink"], "size": 12, "family": FONT},
        hoverlabel={
            "bgcolor": surfaces["card"],
            "bordercolor": surfaces["strong-line"],
            "font": {"color": surfaces["ink"], "size": 12},
        },
        # At the side: the legend is above the figure.
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": surfaces["soft"], "orientation": "v"},
        margin_r=_MODE_BAR_WIDTH,
    )
    for update_axes in (figure.update_xaxes, figure.update_yaxes):
        update_axes(
            gridcolor=surfaces["line"],
            linecolor=surfaces["line"],
            tickcolor=surfaces["line"],
            title_font={"color": surfaces["soft"], "size": 12},
        )
    return figure
