"""A Kineto file's intervals as columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.importers.chrome.trace_events import Args
from ddltrace.analyzer.importers.imported import MAX_TIME_NS, without_time
from ddltrace.analyzer.importers.kineto.decode import Decoded

NOT_EVENTS: Final = "Trace"
"""The category of the profiler's own span around everything."""


@dataclass
class Intervals:
    """All intervals of one file.

    Attributes:
        start: Nanoseconds, on the file's own origin.
        end: Nanoseconds.
        name: Index into `names`.
        category: Index into `categories`, lower case.
        thread: Index into `threads`: a thread's id, or a stream's of device work.
        device: Index into `devices` for device work, else -1.
        correlation: Number that device work shares with the call that launched it, else -1.
        shape: Index into `shapes` for operators whose shapes are known, else -1.
        pid: The process, where it is known.
        args: Row -> arguments, for rows whose name speaks of communication.
        sizes: Row -> bytes of a copy.
        bandwidths: Row -> bandwidth of a copy as Kineto wrote it, GB/s.
        left_out: Intervals without a usable time.
    """

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    name: npt.NDArray[np.int32]
    category: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    correlation: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int32]
    names: list[str]
    categories: list[str]
    threads: list[Any]
    devices: list[Any]
    shapes: list[str]
    pid: int | None
    args: dict[int, Args]
    sizes: dict[int, int]
    bandwidths: dict[int, float]
    left_out: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def fractional(self) -> bool:
        """Whether the file writes fractions of microseconds."""
        return bool(np.any(self.start % 1000) or np.any(self.end % 1000))

    def of_category(self, names: Iterable[str]) -> npt.NDArray[np.bool_]:
        """Which rows are of these categories."""
        wanted = set(names)
        return np.array([name in wanted for name in self.categories] or [False])[self.category]

    def named(
        self, is_wanted: Callable[[str], object], among: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which rows' names fulfil a condition, which is asked once for each name.

        Args:
            is_wanted: The condition: a pattern's `match`, for example.
            among: The rows that come into question; all by default.
        """
        rows = self.name if among is None else self.name[among]
        found = np.bincount(rows, minlength=len(self.names)) > 0
        for code in np.flatnonzero(found).tolist():
            found[code] = bool(is_wanted(self.names[code]))
        wanted: npt.NDArray[np.bool_] = found[self.name]
        return wanted if among is None else wanted & among


def intervals_of(decoded: Decoded) -> Intervals:
    """Makes columns in nanoseconds of what was decoded; rows without a usable time are left out."""
    ts, duration = column(decoded, "ts", np.float64), column(decoded, "dur", np.float64)
    limit = MAX_TIME_NS / 1000
    good = (np.abs(ts) < limit) & (duration >= 0) & (duration < limit)
    good[good] = ~without_time(ts[good], duration[good], ns=1000)
    category = column(decoded, "category", np.int32)
    own_span = np.array([name == NOT_EVENTS for name in decoded.categories] or [False])
    wanted = good & ~own_span[category]
    left_out = len(good) - int(np.count_nonzero(good))
    columns = {
        "name": column(decoded, "name", np.int32),
        "category": category,
        "thread": column(decoded, "thread", np.int32),
        "device": _spread(decoded, "on_device", "device", np.int32),
        "correlation": _spread(decoded, "linked", "correlation", np.int64),
        "shape": _spread(decoded, "shaped", "shape", np.int32),
    }
    args, sizes, bandwidths = decoded.args, decoded.sizes, decoded.bandwidths
    if not wanted.all():
        position = np.cumsum(wanted) - 1
        ts, duration = ts[wanted], duration[wanted]
        columns = {name: values[wanted] for name, values in columns.items()}
        args = {int(position[row]): value for row, value in args.items() if wanted[row]}
        sizes = {int(position[row]): value for row, value in sizes.items() if wanted[row]}
        bandwidths = {int(position[row]): value for row, value in bandwidths.items() if wanted[row]}
    start = _nanoseconds(ts)
    return Intervals(
        start=start,
        end=start + _nanoseconds(duration),
        **columns,
        names=decoded.names or [""],
        categories=[name.lower() for name in decoded.categories],
        threads=decoded.threads,
        devices=decoded.devices,
        shapes=decoded.shapes,
        pid=decoded.pid,
        args=args,
        sizes=sizes,
        bandwidths=bandwidths,
        left_out=left_out,
    )


def column(decoded: Decoded, name: str, kind: Any) -> npt.NDArray[Any]:
    """One of the buffers of a decoded file as an array."""
    return np.frombuffer(decoded.columns[name], kind)


def _spread(decoded: Decoded, rows: str, values: str, kind: Any) -> npt.NDArray[Any]:
    """A column of all rows from one of some rows; -1 elsewhere."""
    spread = np.full(len(column(decoded, "ts", np.float64)), -1, kind)
    spread[column(decoded, rows, np.int64)] = column(decoded, values, kind)
    return spread


def _nanoseconds(microseconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole nanoseconds. Absolute times are too large to be multiplied as floats."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
