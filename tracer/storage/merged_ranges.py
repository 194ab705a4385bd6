"""Reads many small parts of a file in a store with few requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddltrace.tracer.storage.remote_path import RemotePath

_HOLE_BYTES: Final = 8 << 10
"""Parts that are closer than this are read at once: a request costs more than such a hole."""


def read_merged(path: RemotePath, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Reads some parts of a file.

    Args:
        path: The file.
        ranges: First byte and the byte after the last, of each part.

    Returns:
        The content of each part.

    Raises:
        StoreError: The file cannot be read.
    """
    merged: list[tuple[int, int]] = []
    place: dict[tuple[int, int], int] = {}
    for begin, end in sorted(set(ranges)):
        if merged and begin <= merged[-1][1] + _HOLE_BYTES:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
        place[begin, end] = len(merged) - 1
    contents = path.read_ranges(merged)
    parts = []
    for begin, end in ranges:
        number = place[begin, end]
        first = merged[number][0]
        parts.append(contents[number][begin - first : end - first])
    return parts
