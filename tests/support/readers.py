"""Readers of files that helper processes can find by their names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa

from ddltrace.tracer.errors import TraceError


def words(path: Path) -> tuple[int, pa.Table]:
    """The process that read a file, and a table of its words; a word acts where it says so."""
    found = path.read_text(encoding="utf-8").split()
    in_helper = os.environ["READERS_OF"] != str(os.getpid())
    begun = path.with_name("helper-has-begun")
    if in_helper:
        begun.touch()
    while "after-helper" in found and not in_helper and not begun.exists():
        time.sleep(0.001)
    if "refuse" in found:
        raise TraceError(f"{path.name} is refused")
    if "die-in-helper" in found and in_helper:
        os._exit(1)
    if "print" in found:
        print("a library that talks")
    return os.getpid(), pa.table({"word": found, "same": pa.array([1] * len(found))})
