"""Cards that each show one figure of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import plotly.graph_objects as go

from ddltrace.dashboard.address import Address
from ddltrace.dashboard.widgets import card, graph
from ddltrace.dashboard.workspace import OpenTrace

Draw = Callable[[OpenTrace, Address], go.Figure | None]


def figure_cards(
    opened: OpenTrace,
    address: Address,
    figures: Mapping[str, Draw],
    cards: Iterable[tuple[str, str, str]],
) -> list[Any]:
    """The cards of those figures for which the trace has data.

    Args:
        address: The address of the page, which holds the state of its figures.
        figures: Name -> the function that makes the figure; None without data.
        cards: Name, title and explanation of each figure.
    """
    shown = []
    for name, title, hint in cards:
        figure = opened.figure(name, partial(_draw, figures[name], address))
        if figure is not None:
            shown.append(card(title, graph(name, figure.layout.height), hint=hint))
    return shown


def _draw(draw: Draw, address: Address, opened: OpenTrace) -> go.Figure | None:
    return draw(opened, address)
