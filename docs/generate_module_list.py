"""Writes the list of modules into `docs/architecture.md`: `python3 dev.py docs`.

Every module has one line: the first line of its docstring, or of its first comment.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = Path(__file__).with_name("architecture.md")
BEGIN: Final = "<!-- modules: written by `python3 dev.py docs` -->"
END: Final = "<!-- end of modules -->"

SUFFIXES: Final = (".py", ".cpp", ".c", ".h", ".js")
PACKAGES: Final = ("tracer", "analyzer", "experiments", "dashboard", "package-root")


def modules() -> dict[str, list[Path]]:
    """The modules of each folder, by the folder's path below the root."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        paths = (ROOT / package).rglob("*")
        for path in sorted(paths, key=lambda each: (each.parent, each.name)):
            if path.suffix in SUFFIXES and path.stem != "__init__":
                found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


def summary(path: Path) -> str:
    """The first line of a module's docstring, or of its first comment, as Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = re.sub(r"^(\"use strict\";\n)?(//|/\*) ", "", text)
    return re.sub(r"``(.*?)``", r"`\1`", text.split("\n")[0])


def module_list() -> str:
    """The section's text."""
    found = modules()
    lines = [BEGIN]
    for folder in found:
        lines += ["", f"### `{folder}/`", ""]
        lines += [f"- `{path.name}`: {summary(path)}" for path in found[folder]]
    return "\n".join([*lines, "", END])


def render(page: str) -> str:
    """A page with the list brought up to date."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + module_list() + after


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
