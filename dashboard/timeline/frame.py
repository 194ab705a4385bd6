"""The binary encoding of a frame: the intervals for one drawing of the timeline.

Little-endian: a header of 32 bytes (magic, number of intervals n as uint32; window start and
end in ns as float64; pixels and a zero as uint32), followed by the columns: start and end (float64,
ns since the trace's first event; exact up to 104 days), name, event, count and row (uint32), role,
cover (busy share of the pixel, in 1/255) and match (uint8).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.dashboard.timeline.lod import I64
from ddltrace.dashboard.timeline.tracks import Row

MAGIC: Final = 0x464C4444  # "DDLF"
_HEADER: Final = struct.Struct("<IIddII")
_MAX_TIME: Final = 1 << 53


@dataclass(frozen=True)
class Window:
    """The window of a frame.

    Attributes:
        start_ns: Start of the window, since the trace's first event.
        end_ns: End of the window.
        pixels: Width in pixels.
    """

    start_ns: int
    end_ns: int
    pixels: int

    def __post_init__(self) -> None:
        if not -_MAX_TIME <= self.start_ns < self.end_ns <= _MAX_TIME:
            raise ValueError("a window starts before it ends, within 104 days")
        if not 1 <= self.pixels <= 1 << 14:
            raise ValueError("a window is 1 to 16384 pixels wide")

    def edges(self) -> I64:
        """Edges of the pixels in ns, strictly increasing; a pixel is at least 1 ns wide."""
        width = self.end_ns - self.start_ns
        pixels = min(self.pixels, width)
        whole, rest = divmod(width, pixels)
        k = np.arange(pixels + 1, dtype=np.int64)
        return self.start_ns + k * whole + k * rest // pixels


_COLUMNS: Final = ("<f8", "<f8", "<u4", "<u4", "<u4", "<u4", "<u1", "<u1", "<u1")


def encode_frame(
    window: Window,
    layers: list[list[tuple[int, Row]]],
    row_done: Callable[[], None] = lambda: None,
) -> bytes:
    """Reduces rows to a window and encodes the result.

    Args:
        layers: Rows with their numbers: first all of them, then, during a search, the same rows
            with the matching intervals only.
        row_done: Called after each row, which is not used again.

    Returns:
        The frame.
    """
    edges = window.edges()
    columns: list[list[npt.NDArray[Any]]] = [[] for _ in _COLUMNS]
    for match, rows in enumerate(layers):
        for number, row in rows:
            for column, part in zip(columns, _columns(row, edges, number, match), strict=True):
                column.append(part)
            row_done()
    total = sum(map(len, columns[0]))
    header = _HEADER.pack(MAGIC, total, window.start_ns, window.end_ns, window.pixels, 0)
    parts = (
        np.concatenate(column).astype(dtype).tobytes()
        for dtype, column in zip(_COLUMNS, columns, strict=True)
        if column
    )
    return b"".join([header, *parts])


def _columns(row: Row, edges: I64, number: int, match: int) -> tuple[npt.NDArray[Any], ...]:
    """The columns of a row's intervals in a window."""
    found = row.index.reduce(edges)
    at = found.position
    return (
        row.index.start[at],
        row.index.end(at),
        row.label(at),
        row.event[at],
        found.count,
        np.full(len(at), number),
        row.role[at],
        np.rint(255 * np.clip(found.cover, 0, 1)),
        np.full(len(at), match),
    )
