"""A Kineto file's intervals, decoded from JSON into plain columns.

Needs neither NumPy nor Arrow, whose import takes a helper process longer than decoding 30 MB.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress, count
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Final

import msgspec

from ddltrace.analyzer.importers.chrome.trace_events import (
    UNDECODABLE,
    Args,
    Complete,
    EventFile,
    Metadata,
    args_of,
    links_of,
    shapes_of,
)
from ddltrace.analyzer.importers.names import Codes
from ddltrace.analyzer.importers.rank_files import merged_ranks
from ddltrace.tracer.trace.communication_kernels import is_message_kernel

KERNEL: Final = frozenset({"kernel", "mtia_ccp_events"})
COPY: Final = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
SYNC: Final = frozenset({"cuda_sync"})
DEVICE_MARK: Final = frozenset({"gpu_user_annotation"})
MARK: Final = frozenset({"user_annotation"})
OPERATOR: Final = frozenset({"cpu_op", "operator", "python_function", "overhead"})
RUNTIME: Final = frozenset(
    {"cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "mtia_runtime"}
    | {"privateuse1_runtime", "privateuse1_driver"}
)
_OF_PROCESS: Final = frozenset({"cpu_op", "operator", "python_function"}) | RUNTIME
"""Categories of events that bear the id of the recorded process."""

_ON_DEVICE: Final = KERNEL | COPY | SYNC | DEVICE_MARK
_HOST_MESSAGES: Final = (
    *("nccl:", "gloo:", "mpi:", "ucc:", "xccl:", "hccl:", "rccl:"),
    *("record_param_comms", "c10d::"),
)
_ASCEND: Final = "Ascend Hardware"
_ASCEND_COMMUNICATION: Final = ("Communication", "HCCL")
_ASCEND_SUMMARY: Final = "Overlap Analysis"
_ASCEND_COPY: Final = re.compile(r"memcpy|memset", re.IGNORECASE)
_ASCEND_NUMBERS: Final = re.compile(r"__[\d_]+$")
"""Group, place in the group and attempt of a collective, behind its name."""

_ASCEND_TYPES: Final = {"fp32": "float", "fp16": "half", "bfp16": "bfloat16", "fp64": "double"}


class _Sizes(msgspec.Struct, gc=False):
    count: Any = None
    data_type: Any = None


_SIZES: Final = msgspec.json.Decoder(_Sizes)

_EVENT_BYTES: Final = 250
"""Memory of an event's columns, here and in the trace that is made of them."""

_TEXT_BYTES: Final = 250
_NUMBER_BYTES: Final = 200
"""Memory of an entry of a mapping of numbers."""

_MESSAGE_BYTES: Final = 1500
_MAX_NUMBER: Final = 1 << 62


@dataclass
class Decoded:
    """All intervals of one file, unchanged.

    Attributes:
        columns: Buffers of numbers. One for each row: `ts` and `dur` in microseconds (doubles);
            `name`, `category` and `thread`, 32-bit indices into the lists below. One for each
            row that has them: `linked` (row, 64 bits), `correlation` (number that device
            work shares with the call that launched it, 64 bits; -1 if unknown) and
            `stream` (number of the stream in the arguments, 64 bits; -1 without one);
            `on_device` (row, 64 bits) and `device` (32-bit index); `shaped` (row, 64 bits) and
            `shape` (32-bit index).
        names: Distinct names.
        categories: Distinct categories.
        threads: Distinct ids of threads, and of device work's streams.
        devices: Distinct ids of devices.
        merged: The ranks, if a script has merged files of several into this one.
        shapes: Distinct shapes of operators' inputs, as JSON.
        pid: The process, where it is known.
        args: Row -> arguments, for rows whose name speaks of communication.
        sizes: Row -> bytes of a copy.
        bandwidths: Row -> bandwidth of a copy as Kineto wrote it, GB/s.
        meta: The file's top-level entries besides the events.
        losses: Notes on what is missing because the file is damaged.
    """

    columns: dict[str, Any]
    names: list[str]
    categories: list[str]
    threads: list[Any]
    devices: list[Any]
    merged: list[str]
    shapes: list[str]
    pid: int | None
    args: dict[int, Args]
    sizes: dict[int, int]
    bandwidths: dict[int, float]
    meta: dict[str, Any]
    losses: list[str]


def decode_file(path: Path) -> Decoded:
    """Decodes a file.

    Raises:
        TraceError: It has no list of events.
    """
    file = EventFile(path, _EVENT_BYTES)
    builder = _Builder()
    for chunk in file:
        builder.look_at_all(chunk)
        events = [event for event in chunk if type(event) is Complete]
        if builder.is_ascend:
            events = _categorized(events, builder.processes)
        builder.add(events)
        file.more_bytes = builder.more_bytes
    return builder.finish(file)


@dataclass
class _Builder:
    ts: array[float] = field(default_factory=lambda: array("d"))
    dur: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("i"))
    category: array[int] = field(default_factory=lambda: array("i"))
    thread: array[int] = field(default_factory=lambda: array("i"))
    linked: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    on_device: array[int] = field(default_factory=lambda: array("q"))
    device: array[int] = field(default_factory=lambda: array("i"))
    shaped: array[int] = field(default_factory=lambda: array("q"))
    shape: array[int] = field(default_factory=lambda: array("i"))
    names: Codes = field(default_factory=Codes)
    categories: Codes = field(default_factory=Codes)
    threads: Codes = field(default_factory=Codes)
    devices: Codes = field(default_factory=Codes)
    shapes: Codes = field(default_factory=Codes)
    hosts: Counter[Any] = field(default_factory=Counter)
    pid: int | None = None
    args: dict[int, Args] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    bandwidths: dict[int, float] = field(default_factory=dict)
    processes: dict[Any, Any] = field(default_factory=dict)
    is_ascend: bool = False
    speaks: list[bool] = field(default_factory=list)
    is_device: list[bool] = field(default_factory=list)
    is_linked: list[bool] = field(default_factory=list)
    is_operator: list[bool] = field(default_factory=list)
    is_of_process: list[bool] = field(default_factory=list)
    arguments_bytes: int = 0

    @property
    def more_bytes(self) -> int:
        """Memory of what is kept besides the columns: distinct texts, arguments, sizes."""
        distinct = (self.names, self.categories, self.threads, self.devices, self.shapes)
        kept = sum(map(len, distinct)) + len(self.hosts)
        copies = len(self.sizes) + len(self.bandwidths)
        return kept * _TEXT_BYTES + copies * _NUMBER_BYTES + self.arguments_bytes

    def look_at_all(self, chunk: list[Any]) -> None:
        """Notes what the file has besides intervals."""
        for event in chunk:
            if type(event) is Metadata and event.name == "process_name" and event.args:
                self.processes[event.pid] = event.args.name
                self.is_ascend = self.is_ascend or event.args.name == _ASCEND

    def add(self, events: list[Complete]) -> None:
        """Copies the needed values of a chunk, whose objects can then be released."""
        first = len(self.ts)
        self.ts.fromlist([event.ts for event in events])
        self.dur.fromlist([event.dur for event in events])
        names = self.names.of([event.name for event in events])
        categories = self.categories.of([event.cat for event in events])
        threads = self.threads.of([event.tid for event in events])
        self._look_at_new_names()
        linked = _rows(categories, self.is_linked)
        links = links_of([events[row].args for row in linked])
        self.linked.fromlist([first + row for row in linked])
        numbers = [link.correlation for link in links]
        self.correlation.fromlist(
            [n if n is not None and -1 < n < _MAX_NUMBER else -1 for n in numbers]
        )
        self.stream.fromlist([_stream_number(link.stream) for link in links])
        for row, link in zip(linked, links, strict=True):
            if not self.is_device[categories[row]]:
                continue
            self.on_device.append(first + row)
            self.device.append(self.devices[events[row].pid])
            if link.stream is not None:
                threads[row] = self.threads[link.stream]
            if link.bytes is not None and 0 <= link.bytes < _MAX_NUMBER:
                self.sizes[first + row] = int(link.bytes)
            if isinstance(link.bandwidth, (int, float)) and math.isfinite(link.bandwidth):
                self.bandwidths[first + row] = float(link.bandwidth)
        called = _rows(categories, self.is_operator)
        for row, shapes in zip(
            called, shapes_of([events[row].args for row in called]), strict=True
        ):
            if shapes is not None:
                self.shaped.append(first + row)
                self.shape.append(self.shapes[shapes])
        self.hosts.update([events[row].pid for row in _rows(categories, self.is_of_process)])
        for row in _rows(names, self.speaks):
            args = args_of(events[row].args)
            if self.is_ascend:
                args = _with_sizes(args, events[row].args)
            self.args[first + row] = args
            self.arguments_bytes += _MESSAGE_BYTES + _object_bytes(bytes(events[row].args))
        if self.pid is None:
            on_host = (
                event
                for event, code in zip(events, categories, strict=True)
                if not self.is_device[code]
            )
            self.pid = _process_id(next(on_host, None))
        self.name.fromlist(names)
        self.category.fromlist(categories)
        self.thread.fromlist(threads)

    def _look_at_new_names(self) -> None:
        for name in self.names.since(len(self.speaks)):
            self.speaks.append(name.startswith(_HOST_MESSAGES) or is_message_kernel(name))
        for name in self.categories.since(len(self.is_device)):
            plain = name.lower()
            self.is_device.append(plain in _ON_DEVICE)
            self.is_linked.append(plain in _ON_DEVICE or plain in RUNTIME)
            self.is_operator.append(plain in OPERATOR)
            self.is_of_process.append(plain in _OF_PROCESS)

    def finish(self, file: EventFile) -> Decoded:
        columns = ("ts", "dur", "name", "category", "thread")
        sparse = ("linked", "correlation", "stream", "on_device", "device", "shaped", "shape")
        return Decoded(
            columns={name: PickleBuffer(getattr(self, name)) for name in columns + sparse},
            names=list(self.names),
            categories=list(self.categories),
            threads=list(self.threads),
            devices=list(self.devices),
            merged=self._merged(),
            shapes=list(self.shapes),
            pid=self.pid,
            args=self.args,
            sizes=self.sizes,
            bandwidths=self.bandwidths,
            meta=file.meta,
            losses=file.losses(),
        )

    def _merged(self) -> list[str]:
        devices = list(self.devices)
        if self.is_ascend:
            devices = [pid for pid in devices if self.processes.get(pid) == _ASCEND]
        # One event of another process is damage.
        hosts = [pid for pid, times in self.hosts.items() if times > 1]
        return merged_ranks(hosts, devices, self.processes)


def _object_bytes(text: bytes) -> int:
    """An estimate of the memory of decoded JSON, by its lists, mappings and texts."""
    containers = text.count(b"[") + text.count(b"{")
    return 8 * len(text) + 80 * containers + 30 * text.count(b'"')


def _rows(codes: list[int], wanted: list[bool]) -> list[int]:
    """The rows whose codes are wanted."""
    return list(compress(count(), map(wanted.__getitem__, codes)))


def _stream_number(stream: int | str | None) -> int:
    """The stream's number; -1 if it has none."""
    if isinstance(stream, str):
        stream = int(stream) if stream.isdecimal() else None
    return -1 if stream is None or abs(stream) >= _MAX_NUMBER else stream


def _process_id(event: Complete | None) -> int | None:
    pid = None if event is None else event.pid
    return pid if isinstance(pid, int) and 0 <= pid < 1 << 31 else None


def _categorized(events: Iterable[Complete], processes: dict[Any, str]) -> list[Complete]:
    """The events of Ascend's ``trace_view.json`` of torch_npu with Kineto's categories.

    That file has Kineto's form, without categories on devices. What an event is follows from the
    name of its process: ``Ascend Hardware`` has the kernels and copies, ``Communication`` (``HCCL``
    in older versions) the collectives, ``hcom_*``, and beside them their parts. ``Overlap
    Analysis`` sums up the others. (Ascend/msprof-analyze documents these.) Parts and sums of others
    are left out.

    Args:
        events: Intervals, which are changed.
        processes: Id -> name of the processes in the file.
    """
    found = []
    for event in events:
        process = processes.get(event.pid)
        if process == _ASCEND:
            event.cat = "gpu_memcpy" if _ASCEND_COPY.match(event.name) else "kernel"
        elif process in _ASCEND_COMMUNICATION:
            if not event.name.startswith("hcom_"):
                continue
            event.cat, event.name = "kernel", _ASCEND_NUMBERS.sub("_", event.name)
        elif process == _ASCEND_SUMMARY:
            continue
        found.append(event)
    return found


def _with_sizes(args: Args, raw: msgspec.Raw) -> Args:
    """Adds elements and type of a collective as Ascend names them."""
    try:
        sizes = _SIZES.decode(raw) if raw else _Sizes()
    except UNDECODABLE:
        return args
    if args.in_elements is None and isinstance(sizes.data_type, str):
        kind = sizes.data_type.lower()
        return msgspec.structs.replace(
            args, in_elements=sizes.count, dtype=_ASCEND_TYPES.get(kind, kind)
        )
    return args
