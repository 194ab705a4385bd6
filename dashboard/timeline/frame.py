"""The binary encoding of a frame: the intervals for one drawing of the timeline.

Little-endian: a header of 32 bytes (magic, number of intervals n as uint32; window start and
end in ns as float64; pixels and a zero as uint32), followed by the columns: start and end (float64,
ns since the trace's first event; exact up to 104 days), name, event, count and row (uint32), role,
cover (busy share of the pixel, in 1/255) and match (uint8).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.dashboard.timeline.lod import I64, Reduction
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


def encode_frame(window: Window, layers: list[list[tuple[int, Row]]]) -> bytes:
    """Reduces rows to a window and encodes the result.

    Args:
        window: The window.
        layers: Rows with their numbers: first all of them, then, during a search, the same rows
            with the matching intervals only.

    Returns:
        The frame.
    """
    edges = window.edges()
    picked: list[tuple[int, int, Row, Reduction]] = []
    for match, rows in enumerate(layers):
        for number, row in rows:
            reduction = row.index.reduce(edges)
            if len(reduction.position):
                picked.append((match, number, row, reduction))
    columns = (
        ("<f8", [row.index.start[r.position] for _, _, row, r in picked]),
        ("<f8", [row.index.end(r.position) for _, _, row, r in picked]),
        ("<u4", [row.label(r.position) for _, _, row, r in picked]),
        ("<u4", [row.event[r.position] for _, _, row, r in picked]),
        ("<u4", [r.count for _, _, _, r in picked]),
        ("<u4", [np.full(len(r.position), number) for _, number, _, r in picked]),
        ("<u1", [row.role[r.position] for _, _, row, r in picked]),
        ("<u1", [np.rint(255 * np.clip(r.cover, 0, 1)) for _, _, _, r in picked]),
        ("<u1", [np.full(len(r.position), match) for match, _, _, r in picked]),
    )
    total = sum(len(r.position) for _, _, _, r in picked)
    parts = [_HEADER.pack(MAGIC, total, window.start_ns, window.end_ns, window.pixels, 0)]
    for dtype, arrays in columns:
        if arrays:
            parts.append(np.concatenate(arrays).astype(dtype).tobytes())
    return b"".join(parts)
