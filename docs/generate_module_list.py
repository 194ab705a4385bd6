"""Writes the list of modules into `docs/architecture.md`: `python3 dev.py docs`.

Every module has one line: the first line of its docstring. Folders are in the order of the
data flow; a folder that `FOLDERS` does not name comes after the named ones of its package.
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

FOLDERS: Final = (
    *("tracer/launch", "tracer/bootstrap", "tracer/capture", "tracer/interpose"),
    *("tracer/interpose/c10d", "tracer/native", "tracer/naming", "tracer/timing"),
    "tracer/connections",
    *("tracer/record", "tracer/resources", "tracer/trace", "tracer/storage", "tracer"),
    *("analyzer/importers", "analyzer/importers/chakra", "analyzer/importers/chrome"),
    *("analyzer/importers/kineto", "analyzer/importers/straggler_analysis"),
    *("analyzer/trace", "analyzer/events", "analyzer/joined", "analyzer/measures", "analyzer"),
    *(
        "analyzer/live",
        "analyzer/report",
        "analyzer/compare",
        "analyzer/query",
        "analyzer/exporters",
    ),
    "analyzer/formatting",
    *("experiments/strategy", "experiments", "experiments/schedules", "experiments/codecs"),
    *("experiments/codecs/kernels", "experiments/codecs/forms", "experiments/frequency"),
    "experiments/optimizer_rules",
    *(
        "experiments/architectures",
        "experiments/collectives",
        "experiments/synchronization",
        "experiments/asynchrony",
        "experiments/transports",
    ),
    *("experiments/transports/backends", "experiments/messages", "experiments/engine"),
    *("experiments/workloads", "experiments/pacing", "experiments/network"),
    *("experiments/observation", "experiments/harness", "experiments/transport_benchmark"),
    *("dashboard/stored", "dashboard/timeline", "dashboard", "dashboard/pages", "dashboard/runs"),
    "package-root",
)
PACKAGES: Final = ("tracer", "analyzer", "experiments", "dashboard", "package-root")


def modules() -> dict[str, list[Path]]:
    """The modules of each folder, by the folder's path below the root."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.stem != "__init__":
                found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return found


def place(folder: str) -> tuple[int, int, str]:
    """Where a folder stands in the list."""
    package = PACKAGES.index(folder.partition("/")[0])
    known = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
    return package, known, folder


def summary(path: Path) -> str:
    """The first line of a module's docstring, as Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.sub(r"``(.*?)``", r"`\1`", text.split("\n")[0])


def module_list() -> str:
    """The section's text."""
    found = modules()
    lines = [BEGIN]
    for folder in sorted(found, key=place):
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
