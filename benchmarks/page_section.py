"""Parts of pages that scripts write, and those that people write, each between two marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "experiments.md"
RESULTS: Final = ROOT / "benchmarks" / "results"
"""The results of which docs/experiments.md has the tables."""
_BEGIN: Final = "<!-- {name}: written by benchmarks/{name}.py -->"
_END: Final = "<!-- end of {name} -->"
_FINDINGS: Final = "<!-- findings: written by hand, kept by benchmarks/{name}.py -->"
_END_OF_FINDINGS: Final = "<!-- end of findings -->"
_SECTION: Final = re.compile(
    r"<!-- (?P<name>\w+): written by benchmarks/(?P=name)\.py -->\n.*?<!-- end of (?P=name) -->",
    re.DOTALL,
)


def with_interval(value: float, low: float | None, high: float | None, digits: int) -> str:
    """A number with its interval in brackets, if it has one.

    Args:
        digits: Digits after the point.
    """
    text = f"{value:.{digits}f}"
    if low is None or high is None:
        return text
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replaces a section of the page, or appends it.

    Args:
        name: The script's name without its ending; its marks contain it.
        text: The section, in Markdown.
        page: The page.
    """
    section = f"{_BEGIN.format(name=name)}\n{text.strip()}\n{_END.format(name=name)}"
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    for match in _SECTION.finditer(old):
        if match["name"] == name:
            page.write_text(old[: match.start()] + section + old[match.end() :], encoding="utf-8")
            return
    page.write_text(f"{old.rstrip()}\n\n{section}\n".lstrip(), encoding="utf-8")


def sections(page: Path = PAGE) -> list[str]:
    """All sections of the page with their marks, in their order."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return [match.group(0) for match in _SECTION.finditer(text)]


def findings(name: str, page: Path) -> str:
    """What people wrote into a page between its two marks, with these; without it, the marks alone.

    Args:
        name: The name, without its ending, of the script that writes the rest of the page.
        page: The page as it is.
    """
    begin = _FINDINGS.format(name=name)
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    inside = text.partition(begin)[2].partition(_END_OF_FINDINGS)[0] or "\n"
    return f"{begin}{inside}{_END_OF_FINDINGS}"


def write_image(name: str, svg: str, page: Path = PAGE) -> str:
    """Writes a plot beside the page.

    Args:
        name: Name of the file without its ending.
        svg: The plot.
        page: The page.

    Returns:
        The path to use in the page.
    """
    images = page.parent / "images"
    images.mkdir(exist_ok=True)
    (images / f"{name}.svg").write_text(svg, encoding="utf-8")
    return f"images/{name}.svg"
