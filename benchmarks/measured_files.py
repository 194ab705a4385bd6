"""Measurements of which each is kept in a JSON file, so that an interrupted benchmark can go on."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from page_section import with_interval

CaseT = TypeVar("CaseT")


def over_rounds(values: Sequence[float], digits: int) -> str:
    """The median of rounds, with the lowest and the highest in brackets.

    Args:
        values: One for each round.
        digits: Digits after the point.
    """
    return with_interval(statistics.median(values), min(values), max(values), digits)


def measured(
    cases: Iterable[CaseT],
    directory: Path,
    name_of: Callable[[CaseT], str],
    measure: Callable[[CaseT, Path], None] | None,
) -> list[tuple[CaseT, dict[str, Any]]]:
    """Measures the cases that have no file yet, and reads all files.

    Args:
        cases: What to measure.
        directory: Where the files are; it is created.
        name_of: Returns the name of a case's file, without its ending.
        measure: Measures a case and writes the file, unless the measurement fails; None to
            measure nothing.

    Returns:
        The cases that have a file, and its content. The process ends if there is none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found = []
    for case in cases:
        file = directory.resolve() / f"{name_of(case)}.json"
        if measure is not None and not file.is_file():
            measure(case, file)
        if file.is_file():
            found.append((case, json.loads(file.read_text(encoding="utf-8"))))
    if not found:
        sys.exit(f"nothing was measured; see {directory}")
    return found
