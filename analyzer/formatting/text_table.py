"""Plain tables and short names for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Final, Literal

from ddltrace.analyzer.formatting.units import printable

_ELLIPSIS = "…"
_NARROWEST = 4
_SHORT = 16
"""To which a first column is shortened before a table is split."""

_INDENT = "  "
_GAP = "  "

Kept = Literal["start", "end"]


def render(
    header: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    width: int = 100,
    widths: Sequence[int] | None = None,
    keys: int = 1,
) -> list[str]:
    """Lays out a table: the first column to the left, the others to the right.

    A table that is too wide even with a short first column becomes several, one below the other.

    Args:
        header: Names of the columns; None for the later rows of a table.
        rows: Cells; they are made safe to print here.
        width: Characters that a line may take; the first column gives way.
        widths: Width of each column, for a table that is laid out in pieces: it is never split.
        keys: The first columns, which every part of a split table repeats.

    Returns:
        One line for the header and one for each row; as many for every part.
    """
    cells = [_printable(row) for row in ([] if header is None else [header]) + list(rows)]
    lines = aligned(cells, width - len(_INDENT), widths=widths, keys=keys)
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
    keys: int = 1,
) -> list[str]:
    """Aligns columns: the first one to the left, the others to the right.

    Args:
        rows: Cells, all of them safe to print; headers are rows, too.
        width: Characters that a line may take; the first column gives way.
        keep: Which part of a text in the first column is kept if it is too long.
        widths: Width of each column, if it does not follow from these rows alone: the table is
            never split then.
        keys: The first columns, which every part of a split table repeats.
    """
    if widths is not None:
        return _one_part(rows, width, keep, widths)
    needed = [max(map(columns_of, column)) for column in zip(*rows, strict=True)]
    lines = []
    for places in _parts(needed, width, keys):
        part = [[row[place] for place in places] for row in rows]
        lines += _one_part(part, width, keep, [needed[place] for place in places])
    return lines


def _parts(needed: Sequence[int], width: int, keys: int) -> list[list[int]]:
    """The columns of each part of a table, as few parts as fit.

    Args:
        needed: Characters that each column needs.
        width: Characters that a line may take.
        keys: The first columns, which every part repeats.
    """
    first = list(range(keys))
    widths = [min(needed[0], _SHORT), *needed[1:]]
    left = width - sum(widths[:keys]) - len(_GAP) * (keys - 1)
    parts, taken = [list(first)], 0
    for place in range(keys, len(needed)):
        taken += widths[place] + len(_GAP)
        if taken > left and len(parts[-1]) > keys:
            parts.append(list(first))
            taken = widths[place] + len(_GAP)
        parts[-1].append(place)
    return parts


def _one_part(
    rows: Sequence[Sequence[str]], width: int, keep: Kept, widths: Sequence[int]
) -> list[str]:
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


_NAMESPACE: Final = re.compile(r"(?:\b[A-Za-z_]\w*|\(anonymous namespace\))::")
_RETURN_TYPE: Final = "void "


def kernel_text(name: str, width: int) -> str:
    """Returns the start of the name of a kernel or operator within a width.

    Names of templates and functions lose their namespaces; ``aten::mm`` stays as it is.
    Kernels of one template differ in its arguments only, which namespaces would push out of a
    column: ``vectorized_elementwise_kernel<4, FillFunctor<int>, ...``.
    """
    text = printable(name).removeprefix(_RETURN_TYPE)
    if "<" in text or "(" in text:
        text = _NAMESPACE.sub("", text)
    return shorten(text, width, "start")
