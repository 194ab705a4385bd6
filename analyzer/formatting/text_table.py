"""Plain tables for a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

from ddltrace.analyzer.formatting.units import printable

_ELLIPSIS = "…"
_NARROWEST = 4
_INDENT = "  "
_GAP = "  "

Kept = Literal["start", "end"]


def render(
    header: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    width: int = 100,
    widths: Sequence[int] | None = None,
) -> list[str]:
    """Lays out a table: the first column to the left, the others to the right.

    Args:
        header: Names of the columns; None for the later rows of a table.
        rows: Cells; they are made safe to print here.
        width: Characters that a line may take; the first column gives way.
        widths: Width of each column, for a table that is laid out in pieces.

    Returns:
        One line for the header and one for each row.
    """
    cells = [_printable(row) for row in ([] if header is None else [header]) + list(rows)]
    lines = aligned(cells, width - len(_INDENT), widths=widths)
    return [(_INDENT + line).rstrip() for line in lines]


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width that each column needs.

    Args:
        rows: At least one row of cells, as `render` takes them.
    """
    return [max(map(columns_of, column)) for column in zip(*map(_printable, rows), strict=True)]


def _printable(row: Sequence[str]) -> list[str]:
    return [printable(cell) for cell in row]


def aligned(
    rows: Sequence[Sequence[str]],
    width: int,
    keep: Kept = "end",
    widths: Sequence[int] | None = None,
) -> list[str]:
    """Aligns columns: the first one to the left, the others to the right.

    Args:
        rows: Cells, all of them safe to print.
        width: Characters that a line may take; the first column gives way.
        keep: Which part of a text in the first column is kept if it is too long.
        widths: Width of each column, if it does not follow from these rows alone.
    """
    if widths is None:
        widths = [max(map(columns_of, column)) for column in zip(*rows, strict=True)]
    widths = list(widths)
    others = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
    widths[0] = max(min(widths[0], width - others), _NARROWEST)
    lines = []
    for row in rows:
        first = shorten(row[0], widths[0], keep)
        line = [first + " " * (widths[0] - columns_of(first))]
        line += [" " * (w - columns_of(c)) + c for c, w in zip(row[1:], widths[1:], strict=True)]
        whole = _GAP.join(line).rstrip()
        # Only very long numbers are cut here: mark them.
        lines.append(whole if columns_of(whole) <= width else whole[: width - 1] + _ELLIPSIS)
    return lines


def columns_of(text: str) -> int:
    """Number of terminal columns of a text: wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, width: int, keep: Kept = "end") -> str:
    """Shortens a text to a width; by default its end is kept, which identifies parameters."""
    if columns_of(text) <= width:
        return text
    while columns_of(text) > width - 1:
        text = text[1:] if keep == "end" else text[:-1]
    return _ELLIPSIS + text if keep == "end" else text + _ELLIPSIS
