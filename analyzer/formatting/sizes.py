"""Sizes of memory as a user writes them."""

from __future__ import annotations

import re
from typing import Final

from ddltrace.tracer.errors import UsageError

LEAST_MEMORY: Final = 16_000_000
"""With less than 16 MB nothing can be read or queried."""

_UNITS: Final = {
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?i?B)", re.IGNORECASE)


def parse_memory_limit(text: str) -> int:
    """Reads a limit such as ``2GB`` or ``512MiB``; the result is in bytes.

    Raises:
        UsageError: The text is not a size, or less than 16 MB.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < LEAST_MEMORY:
        raise UsageError(f"{text!r:.40} is not a memory limit: write 16MB or more, such as 2GB")
    return size
