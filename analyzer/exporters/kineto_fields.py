"""Fields of Kineto's JSON that tools for GPU traces look for.

Holistic Trace Analysis recognizes device work by ``args.stream`` and ``args.correlation``, kernels
and copies by ``cat``, and steps by user annotations named ``ProfilerStep#N``.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import KIND, NULL, BoolArray, Columns, IntArray, named
from ddltrace.analyzer.events.launches import (
    is_python_call,
    is_runtime_call,
    launches_of,
)

FIRST_CORRELATION: Final = 1 << 16
"""HTA stores row numbers in the type of the correlation numbers; 8 or 16 bits are too few."""

_STREAM: Final = re.compile(r"(?:sync/)?stream-(\d{1,18})(?:@(\d{1,9}))?$")
_CATEGORIES: Final = (
    "",  # keeps the category of every other trace: the event's kind
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_sync",
    "cuda_runtime",
    "cpu_op",
    "python_function",
    "user_annotation",
    "gpu_user_annotation",
)
_CODE: Final = {name: code for code, name in enumerate(_CATEGORIES)}


class KinetoFields:
    """What the events of a rank with a device are in Kineto's terms.

    Args:
        columns: All events of the rank.
        first_correlation: The number that the first pair of launch and device work gets.

    Attributes:
        next_correlation: The first number that is not used.
    """

    def __init__(self, columns: Columns, first_correlation: int) -> None:
        self._stream, self._device = _streams(columns)
        self._bandwidth = _copy_bandwidth(columns)
        self._category = _categories(columns, self._stream)
        work = np.flatnonzero(self._stream != NULL)
        call = launches_of(columns)[work]
        # Works of one call share its number; a work without a call has one of its own.
        key = np.where(call != NULL, call, len(columns) + work)
        _, number = np.unique(key, return_inverse=True)
        self._correlation = np.full(len(columns), NULL, dtype=np.int64)
        self._correlation[work] = first_correlation + number
        self._correlation[call[call != NULL]] = first_correlation + number[call != NULL]
        self.next_correlation = first_correlation + int(number.max(initial=-1)) + 1

    def categories(self, rows: IntArray, kinds: pa.Array) -> pa.Array:
        """The ``cat`` of some events; those without one of their own keep their kind."""
        codes = self._category[rows]
        own = pa.array(_CATEGORIES, pa.string()).take(pa.array(codes))
        chosen = pc.if_else(pa.array(codes == 0), kinds.cast(pa.string()), own)
        return chosen.dictionary_encode()

    def arguments(self, rows: IntArray) -> dict[str, pa.Array]:
        """Additional ``args`` of some events; null where an event has none."""
        found = {}
        for name, column in (
            ("device", self._device),
            ("stream", self._stream),
            ("correlation", self._correlation),
        ):
            values = column[rows]
            if (values != NULL).any():
                found[name] = pa.array(values, mask=values == NULL)
        bandwidth = self._bandwidth[rows]
        if not np.isnan(bandwidth).all():
            found["memory bandwidth (GB/s)"] = pa.array(bandwidth, mask=np.isnan(bandwidth))
        return found


def has_device_work(columns: Columns) -> bool:
    """Whether any event is a kernel or a copy on a stream."""
    return bool(np.isin(columns.kind, [KIND["kernel"], KIND["copy"]]).any())


def _streams(columns: Columns) -> tuple[IntArray, IntArray]:
    matches = [_STREAM.match(lane) for lane in columns.lanes]
    streams = [NULL if match is None else int(match[1]) for match in matches]
    devices = [NULL if match is None else int(match[2] or 0) for match in matches]
    return (
        np.array([*streams, NULL], dtype=np.int64)[columns.lane],
        np.array([*devices, NULL], dtype=np.int64)[columns.lane],
    )


def _copy_bandwidth(columns: Columns) -> npt.NDArray[np.float64]:
    """Bytes per nanosecond, which is GB/s, of each copy; NaN for all other events."""
    rows = columns.rows("copy")
    size, start, end = columns.ints("bytes")[rows], columns.start[rows], columns.end[rows]
    known = (size >= 0) & (end > start)
    bandwidth = np.full(len(columns), np.nan)
    bandwidth[rows[known]] = size[known] / (end - start)[known]
    return bandwidth


def _categories(columns: Columns, stream: IntArray) -> IntArray:
    kind = columns.kind
    on_stream = stream != NULL
    host = kind == KIND["host"]
    annotation = np.isin(kind, [KIND[name] for name in ("step", "phase", "data", "marker")])
    device_annotation = np.array([*(x.startswith("annotation/") for x in columns.lanes), False])
    rules: tuple[tuple[BoolArray, str], ...] = (
        (on_stream & np.isin(kind, [KIND["kernel"], KIND["message"]]), "kernel"),
        (on_stream & (kind == KIND["copy"]), "gpu_memcpy"),
        (on_stream & (kind == KIND["copy"]) & named(columns, _is_fill), "gpu_memset"),
        (host, "cpu_op"),
        (host & named(columns, is_python_call), "python_function"),
        (host & named(columns, is_runtime_call), "cuda_runtime"),
        (host & on_stream, "cuda_sync"),
        (annotation, "user_annotation"),
        (annotation & device_annotation[columns.lane], "gpu_user_annotation"),
    )
    codes = np.zeros(len(columns), dtype=np.int8)
    for rows, name in rules:
        codes[rows] = _CODE[name]
    return codes


def _is_fill(name: str) -> bool:
    return name.startswith("Memset")
