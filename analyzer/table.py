"""Plain tables for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from ddltrace.analyzer.units import printable

_ELLIPSIS = "…"
_NARROWEST = 4


def render(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = 100) -> list[str]:
    """Lays out a table: the first column to the left, the others to the right.

    Args:
        header: Names of the columns.
        rows: Cells; they are made safe to print here.
        width: Characters that a line may take; the first column gives way.

    Returns:
        One line for the header and one for each row.
    """
    cells = [[printable(cell) for cell in row] for row in [header, *rows]]
    widths = [max(columns_of(row[i]) for row in cells) for i in range(len(header))]
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * len(widths)), _NARROWEST)
    lines = []
    for row in cells:
        first = shorten(row[0], widths[0])
        line = [first + " " * (widths[0] - columns_of(first))]
        line += [" " * (w - columns_of(c)) + c for c, w in zip(row[1:], widths[1:], strict=True)]
        whole = ("  " + "  ".join(line)).rstrip()
        # Only numbers far beyond a table's come to this: say that they go on.
        lines.append(whole if columns_of(whole) <= width else whole[: width - 1] + _ELLIPSIS)
    return lines


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters take two, marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, width: int) -> str:
    """A text cut to a width, its end kept: the end of a parameter's name tells most."""
    if columns_of(text) <= width:
        return text
    while columns_of(text) > width - 1:
        text = text[1:]
    return _ELLIPSIS + text
