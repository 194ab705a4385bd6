"""Prints the section of CHANGELOG.md that describes a version: the notes of its release."""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def notes(text: str, version: str) -> str:
    """The section of a version, without its heading.

    Args:
        text: The changelog.
        version: A version, with or without a leading ``v``.

    Raises:
        SystemExit: The changelog has no section for it, or an empty one.
    """
    number = version.removeprefix("v")
    heading = re.escape(f"## [{number}]")
    section = re.search(rf"^{heading}.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no entries for {number}")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1]))
