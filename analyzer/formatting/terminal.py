"""Reports for a terminal: laid out for its width, and colored where it has colors."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.formatting.units import printable_words, value_text

_NARROWEST: Final = 60
_WIDEST: Final = 120
_FALLBACK: Final = 80
"""Columns where nobody says how many there are, as in a file or a pipe."""

_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:%|[nµm]?s|[kMGT]?B|[kMGT]?bit/s)(?!\w))")

_LONGEST_BAR: Final = 40


@dataclass(frozen=True)
class Paragraph:
    """A text that is wrapped.

    Attributes:
        text: Made safe to print when it is laid out.
        indent: Before every line after the first.
        color: Of all its lines, where the terminal has colors.
        bold: Whether it stands out there.
    """

    text: str
    indent: str = ""
    color: str | None = None
    bold: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table that is split into several, one below the other, where it is too wide.

    Attributes:
        header: Names of the columns.
        rows: Cells, made safe to print when they are laid out.
        keys: The first columns, which are repeated in every part.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: int = 1


Columns = Mapping[str, str | Callable[[Any], str]]
"""Head of a column -> an attribute of a row, whose name tells its unit (``_us``, ``_gbps``,
``share``, ``bytes``), or a function that makes the text of a row's cell."""


def table_of(rows: Iterable[Any], columns: Columns, keys: int = 1) -> TextTable:
    """A table of records; `keys` as in `TextTable`."""
    cells = [
        [
            value_text(value, getattr(row, value)) if isinstance(value, str) else value(row)
            for value in columns.values()
        ]
        for row in rows
    ]
    return TextTable(list(columns), cells, keys)


@dataclass(frozen=True)
class Bar:
    """A line that ends with a bar.

    Attributes:
        text: What stands before the bar, safe to print.
        share: The length of the bar, as a share of the longest one.
        color: Of the bar, where the terminal has colors.
    """

    text: str
    share: float
    color: str | None = None


Line = str | Paragraph | TextTable | Bar
"""A part of a section; a string is one line, or several if it is too long."""

Section = list[Line]


def terminal_width() -> int:
    """The columns that a report may take: those of the terminal or of ``COLUMNS``, else 80.

    Returns:
        60 to 120: no narrower, as tables would not be readable, and no wider, as texts would not.
    """
    columns = shutil.get_terminal_size((_FALLBACK, 24)).columns
    return max(_NARROWEST, min(columns, _WIDEST))


def has_colors() -> bool:
    """Whether standard output is a terminal whose user did not refuse colors by ``NO_COLOR``."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def more(count: int, shown: int) -> Section:
    """A line that says how many rows a table leaves out; nothing if it shows all of them."""
    return [f"  {count - shown} more in --json"] if count > shown else []


def layout(sections: Sequence[Section], width: int, *, colors: bool = False) -> str:
    """Lays out sections, an empty line between them.

    Args:
        sections: Empty ones are left out. A string that begins a section is its title.
        width: Columns that a line may take.
        colors: Whether to color titles, headers of tables and bars.
    """
    return "\n\n".join(
        "\n".join(
            line
            for number, each in enumerate(section)
            for line in _lines(each, width, colors=colors, is_title=number == 0)
        )
        for section in sections
        if section
    )


def _lines(line: Line, width: int, *, colors: bool, is_title: bool) -> list[str]:
    if isinstance(line, TextTable):
        lines = render(line.header, line.rows, width, keys=line.keys)
        if not colors:
            return lines
        every = len(line.rows) + 1
        return [
            click.style(each, dim=True) if number % every == 0 else each
            for number, each in enumerate(lines)
        ]
    if isinstance(line, Paragraph):
        lines = wrapped(line.text, width, line.indent)
        if colors and (line.color or line.bold):
            return [click.style(each, fg=line.color, bold=line.bold) for each in lines]
        return lines
    if isinstance(line, Bar):
        longest = min(_LONGEST_BAR, width - len(line.text) - 2)
        bar = "#" * max(1, round(line.share * longest))
        return [f"{line.text}  {click.style(bar, fg=line.color) if colors else bar}"]
    indent = line[: len(line) - len(line.lstrip())]
    lines = [indent + each for each in wrapped(line.strip(), width - len(indent), "  ")]
    return [click.style(each, bold=True) for each in lines] if colors and is_title else lines


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wraps a text, safe to print.

    Args:
        text: Any text.
        width: Columns that a line may take.
        indent: Before every line after the first.
    """
    # A number keeps its unit: names have no such space, as it is not printable.
    glued = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", printable_words(text))
    lines = textwrap.wrap(
        glued,
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
