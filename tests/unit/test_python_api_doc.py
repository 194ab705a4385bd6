"""Every code block of docs/python-api.md runs and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python-api.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def test_page_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python\n") > 1
    assert sum(block[2] is not None for block in blocks) == text.count("```text\n")
    namespace: dict[str, Any] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Line numbers of the page, so that a failure shows where it stands.
            exec(compile("\n" * line + block[1], str(PAGE), "exec"), namespace)
        # Frames pad their header; pages do not end lines with spaces.
        found = re.sub(r" +$", "", printed.getvalue(), flags=re.MULTILINE)
        assert found == (block[2] or ""), f"{PAGE.name}:{line + 1}"
