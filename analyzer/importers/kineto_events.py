"""A Kineto file's intervals as columns of numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.importers.communication import is_message_kernel
from ddltrace.analyzer.importers.imported import MAX_TIME_NS
from ddltrace.analyzer.importers.names import Codes
from ddltrace.analyzer.importers.trace_events import (
    Args,
    Complete,
    EventFile,
    Link,
    args_of,
    links_of,
)

KERNEL: Final = frozenset({"kernel"})
COPY: Final = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
SYNC: Final = frozenset({"cuda_sync"})
DEVICE_MARK: Final = frozenset({"gpu_user_annotation"})
MARK: Final = frozenset({"user_annotation"})
OPERATOR: Final = frozenset({"cpu_op", "operator", "python_function", "overhead"})
RUNTIME: Final = frozenset(
    {"cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "mtia_runtime"}
    | {"privateuse1_runtime", "privateuse1_driver"}
)
_NOT_EVENTS: Final = frozenset({"Trace"})
"""The profiler's own span around everything."""

_HOST_MESSAGE: Final = re.compile(
    r"(?:nccl|gloo|mpi|ucc|xccl|hccl|rccl):|record_param_comms$|c10d::"
)


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
        pid: The process, where it is known.
        args: Row -> arguments, for rows whose name speaks of communication.
        sizes: Row -> bytes of a copy.
        fractional: Whether the file writes fractions of microseconds.
        left_out: Intervals without a usable time.
    """

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    name: npt.NDArray[np.int32]
    category: npt.NDArray[np.int32]
    thread: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    correlation: npt.NDArray[np.int64]
    names: list[str]
    categories: list[str]
    threads: list[Any]
    devices: list[Any]
    pid: int | None
    args: dict[int, Args]
    sizes: dict[int, int]
    fractional: bool
    left_out: int

    def __len__(self) -> int:
        return len(self.start)

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


@dataclass
class _Builder:
    names: Codes = field(default_factory=Codes)
    categories: Codes = field(default_factory=Codes)
    threads: Codes = field(default_factory=Codes)
    devices: Codes = field(default_factory=Codes)
    pid: int | None = None
    speaks: list[bool] = field(default_factory=list)
    on_device: list[bool] = field(default_factory=list)
    is_linked: list[bool] = field(default_factory=list)
    parts: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    args: dict[int, Args] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    rows: int = 0

    def add(self, events: list[Complete]) -> None:
        """Takes over what is needed of a chunk; its objects can go."""
        count = len(events)
        names = self.names.of(map(attrgetter("name"), events), count)
        categories = self.categories.of(map(attrgetter("cat"), events), count)
        threads = self.threads.of(map(attrgetter("tid"), events), count)
        self._look_at_new_names()
        correlation = np.full(count, -1, dtype=np.int64)
        device = np.full(count, -1, dtype=np.int32)
        linked = np.flatnonzero(np.array(self.is_linked)[categories])
        links = links_of([events[row].args for row in linked.tolist()])
        correlation[linked] = [_correlation(link) for link in links]
        on_device = np.array(self.on_device)[categories[linked]]
        for index in np.flatnonzero(on_device).tolist():
            row, link = int(linked[index]), links[index]
            device[row] = self.devices[events[row].pid]
            if link.stream is not None:
                threads[row] = self.threads[link.stream]
            if link.bytes is not None and 0 <= link.bytes < MAX_TIME_NS:
                self.sizes[self.rows + row] = int(link.bytes)
        for row in np.flatnonzero(np.array(self.speaks)[names]).tolist():
            self.args[self.rows + row] = args_of(events[row].args)
        if self.pid is None:
            host = np.flatnonzero(device < 0)
            self.pid = _process_id(events[int(host[0])]) if len(host) else None
        for name, values in (
            ("start", np.fromiter(map(attrgetter("ts"), events), np.float64, count)),
            ("duration", np.fromiter(map(attrgetter("dur"), events), np.float64, count)),
            ("name", names),
            ("category", categories),
            ("thread", threads),
            ("device", device),
            ("correlation", correlation),
        ):
            self.parts.setdefault(name, []).append(values)
        self.rows += count

    def _look_at_new_names(self) -> None:
        for name in self.names.since(len(self.speaks)):
            self.speaks.append(_speaks_of_communication(name))
        for name in self.categories.since(len(self.on_device)):
            plain = name.lower()
            on_device = plain in KERNEL | COPY | SYNC | DEVICE_MARK
            self.on_device.append(on_device)
            self.is_linked.append(on_device or plain in RUNTIME)

    def finish(self) -> Intervals:
        parts = {name: np.concatenate(arrays) for name, arrays in self.parts.items()}
        ts, duration = parts["start"], parts["duration"]
        limit = MAX_TIME_NS / 1000
        good = (np.abs(ts) < limit) & (duration >= 0) & (duration < limit)
        own_span = np.array([name in _NOT_EVENTS for name in self.categories] or [False])
        wanted = good & ~own_span[parts["category"]]
        start = _nanoseconds(np.where(good, ts, 0.0))
        end = start + _nanoseconds(np.where(good, duration, 0.0))
        columns = {
            "start": start,
            "end": end,
            **{name: parts[name] for name in parts if name not in ("start", "duration")},
        }
        args, sizes = self.args, self.sizes
        if not wanted.all():
            position = np.cumsum(wanted) - 1
            columns = {name: values[wanted] for name, values in columns.items()}
            args = {int(position[row]): value for row, value in args.items() if wanted[row]}
            sizes = {int(position[row]): value for row, value in sizes.items() if wanted[row]}
        return Intervals(
            **columns,
            names=list(self.names) or [""],
            categories=[name.lower() for name in self.categories],
            threads=list(self.threads),
            devices=list(self.devices),
            pid=self.pid,
            args=args,
            sizes=sizes,
            fractional=bool(np.any(start % 1000) or np.any(end % 1000)),
            left_out=int(len(good) - good.sum()),
        )


def read_intervals(file: EventFile) -> Intervals:
    """Reads all intervals of a file.

    Args:
        file: The file; its notes are filled when this returns.

    Raises:
        TraceError: It has no list of events.
    """
    builder = _Builder()
    builder.add([])
    for chunk in file:
        builder.add([event for event in chunk if type(event) is Complete])
    return builder.finish()


def _speaks_of_communication(name: str) -> bool:
    return _HOST_MESSAGE.match(name) is not None or is_message_kernel(name)


def _correlation(link: Link) -> int:
    number = link.correlation
    return number if number is not None and -1 < number < MAX_TIME_NS else -1


def _process_id(event: Complete) -> int | None:
    return event.pid if isinstance(event.pid, int) and 0 <= event.pid < 1 << 31 else None


def _nanoseconds(microseconds: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole nanoseconds. Absolute times are too large to be multiplied as floats."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)
