"""The dashboard's font, and the colors of its figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

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
_AXIS: Final = re.compile(r"[xy]axis\d*")


def parse_theme(value: object) -> Theme:
    """The theme that a browser requests; light for unknown values."""
    return "dark" if value == "dark" else DEFAULT_THEME


def style_sheet() -> str:
    """The font and the palette as CSS variables."""
    return f":root {{ --font: {FONT}; }}\n{palette.style_sheet()}"


def dress(figure: go.Figure, theme: Theme) -> dict[str, Any]:
    """Colors a figure whose traces name their roles in ``meta``.

    Args:
        figure: The figure; it is not changed.
        theme: Light or dark.

    Returns:
        A colored copy, as the dictionary that a browser gets: Plotly's classes check each property
        that is set, which would take as long as making the figure.
    """
    colored: dict[str, Any] = figure.to_dict()
    roles, surfaces = ROLES[theme], SURFACES[theme]
    for trace in colored["data"]:
        _color_trace(trace, roles, surfaces)
    layout = colored["layout"]
    changes: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": surfaces["ink"], "size": 12, "family": FONT},
        "hoverlabel": {
            "bgcolor": surfaces["card"],
            "bordercolor": surfaces["strong-line"],
            "font": {"color": surfaces["ink"], "size": 12},
        },
        # At the side: the legend is above the figure.
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": surfaces["soft"], "orientation": "v"},
        "margin": {"r": _MODE_BAR_WIDTH},
    }
    line = surfaces["line"]
    for name in {"xaxis", "yaxis", *filter(_AXIS.fullmatch, layout)}:
        changes[name] = {
            **{"gridcolor": line, "linecolor": line, "tickcolor": line},
            "title": {"font": {"color": surfaces["soft"], "size": 12}},
        }
    _update(layout, changes)
    return colored


def _color_trace(
    trace: dict[str, Any], roles: Mapping[str, str], surfaces: Mapping[str, str]
) -> None:
    role = trace.get("meta", {}).get("role", "muted")
    if role == "scale":
        trace["colorscale"] = [[0, roles["scale-low"]], [1, roles["scale-high"]]]
        return
    color = roles[role]
    changes: dict[str, Any] = {"marker": {"color": color}}
    if trace["type"] == "bar":
        changes["marker"]["line"] = {"width": 0}
        changes["insidetextfont"] = {"color": palette.ink_on(color)}
        changes["outsidetextfont"] = {"color": surfaces["ink"]}
    else:
        changes["line"] = {"color": color}
    if trace["type"] == "box":
        changes["fillcolor"] = "rgba(128, 128, 128, 0.12)"  # the points are drawn on top
    _update(trace, changes)


def _update(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Sets properties, and those inside of properties."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            _update(target.setdefault(name, {}), value)
        else:
            target[name] = value
