"""The architecture page names every module, and every name on it exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import scripts

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generator() -> Any:
    return scripts.load(ROOT / "docs" / "generate_module_list.py")


def test_every_module_is_named(generator: Any) -> None:
    section = PAGE.split(generator.BEGIN)[1].split(generator.END)[0]
    named = set()
    folder = ""
    for line in section.splitlines():
        if line.startswith("### "):
            folder = line.split("`")[1]
        elif match := re.match(r"- `(\w+\.\w+)`: \S", line):
            named.add(folder + match[1])
    modules = {
        path.relative_to(ROOT).as_posix()
        for paths in generator.modules().values()
        for path in paths
    }
    assert named == modules, "python3 dev.py docs"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rooms = r"(?:tracer|analyzer|dashboard|experiments|docs|benchmarks|package-root)"
    paths = set(re.findall(rf"`({rooms}/[\w./-]*)`", text))
    assert len(paths) > 5
    gone = sorted(path for path in paths if not (ROOT / path).exists())
    assert not gone, f"{page} names {gone}"
