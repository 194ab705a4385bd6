"""Writes `docs/report-reference.md` from the records of the analysis: `python3 dev.py docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ddltrace.analyzer import model
from ddltrace.analyzer.compare import comparison

PAGE = Path(__file__).with_name("report-reference.md")

INTRODUCTION = """\
# What the JSON holds

Written by `python3 dev.py docs` from the records that hold it; a test fails when the two differ.

Times are microseconds (`_us`), shares are fractions from 0 to 1, bandwidths are gigabits per
second (`_gbps`). What the trace cannot give is null, never zero. Keys may be added; those that
are here keep their meaning as long as `schema` stays the same. In Python the same records are
the attributes of `Analysis`, see [python-api.md](python-api.md).
"""

DOCUMENTS = (
    ("ddltrace analyze --json", model.SCHEMA, model.Analysis),
    ("ddltrace compare --json", comparison.SCHEMA, comparison.Comparison),
)


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION]
    for command, schema, root in DOCUMENTS:
        parts.append(f"# `{command}`\n\n`schema` is `{schema}`.\n")
        parts += list(sections(root, ""))
    return "\n".join(parts)


def sections(record: type, place: str) -> Iterator[str]:
    """The section of a record and those of the records in it, depth first."""
    meanings = attributes(record)
    inner: list[tuple[type, str]] = []
    lines = []
    for field in dataclasses.fields(record):
        if not field.repr:
            continue
        kind = record_in(record, str(field.type))
        many = str(field.type).startswith("tuple[")
        if kind is not None:
            inner.append((kind, f"{place}{field.name}{'[]' if many else ''}"))
        lines.append(f"- `{field.name}`: {meanings.get(field.name, '')}".rstrip(" :"))
    summary = (inspect.getdoc(record) or "").partition("\n\n")[0]
    title = place.rstrip(".") or "the whole"
    yield f"## {f'`{title}`' if place else title}\n\n{summary}\n\n" + "\n".join(lines) + "\n"
    for kind, name in inner:
        yield from sections(kind, f"{name}.")


def record_in(record: type, annotation: str) -> type | None:
    """The record that a field of this type holds, itself or in a list; None for plain values."""
    names = re.findall(r"[A-Z]\w+", annotation)
    found = [getattr(sys.modules[record.__module__], name, None) for name in names]
    kinds = (kind for kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind))
    return next(kinds, None)


def attributes(record: type) -> dict[str, str]:
    """What the docstring says of each attribute."""
    _, _, text = (inspect.getdoc(record) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + text.split("\n\n")[0]):
        names, colon, meaning = entry.strip().partition(": ")
        if colon:
            meaning_text = " ".join(meaning.split()).replace("``", "`").replace("None", "null")
            found |= dict.fromkeys(names.split(", "), meaning_text)
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
