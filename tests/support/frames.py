"""Decodes the frames that the timeline's server encodes, apart from the code under test."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ddltrace.dashboard.timeline.frame import MAGIC


def decode_frame(body: bytes) -> dict[str, Any]:
    """The header and the columns of a frame, by name."""
    magic, n, t0, t1, pixels, _ = struct.unpack_from("<IIddII", body)
    assert magic == MAGIC
    columns: dict[str, Any]
    columns, at = {"t0": t0, "t1": t1, "pixels": pixels}, 32
    for name, dtype in [
        ("start", "<f8"),
        ("end", "<f8"),
        *((name, "<u4") for name in ("name", "event", "count", "row")),
        *((name, "<u1") for name in ("role", "cover", "match")),
    ]:
        columns[name] = np.frombuffer(body, dtype, n, at)
        at += columns[name].nbytes
    assert at == len(body)
    return columns
