"""Execution traces of MLCommons Chakra: a graph of computation and communication per rank.

The nodes of a rank are its pieces of computation and its messages, in the order in which they
began. A thread's nested intervals are cut into pieces of the innermost one; while the thread waits
for a message, it computes nothing. A node depends only on nodes before it:

- a piece, on the piece before it in its lane, on the message that its thread waited for in
  between, and, on a device, on the piece of the host that launched it;
- a message, on the last message of its group that was over when it began, and on the piece of
  the host that enqueued it.

Times are cut to microseconds, the unit of the format, and count from the trace's first event.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import pyarrow as pa

from ddltrace.analyzer.exporters.tracks import ends_of, tracks_of
from ddltrace.analyzer.importers.chakra.messages import (
    COLLECTIVE,
    COLLECTIVES,
    COMP,
    MEM_LOAD,
    RECV,
    SEND,
    VERSION,
    messages,
)
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_HOST_KINDS: Final = frozenset({"phase", "layer", "data", "codec", "host"})
_DEVICE_KINDS: Final = frozenset({"kernel", "copy"})
_SPANS: Final = ("step", "phase", "wait")
_COLUMNS: Final = (
    *("start_ns", "kind", "name", "lane", "step", "phase", "id", "parent", "op", "group", "seq"),
    *("peer", "tag", "bytes", "out_bytes", "dtype", "enqueue_ns", "status"),
)
_TYPE_OF: Final = {op: number for number, op in sorted(COLLECTIVES.items(), reverse=True)}

Event = dict[str, Any]


@dataclass
class _Piece:
    """A node to be: a message, or a part of an event in which nothing else runs inside it."""

    start_ns: int
    end_ns: int
    event: Event
    awaited: int | None = None
    deps: set[int] = field(default_factory=set)

    @property
    def is_message(self) -> bool:
        return bool(self.event["kind"] == "message")

    @property
    def on_host(self) -> bool:
        return self.event["kind"] in _HOST_KINDS


def write_each_rank(trace: Trace, folder: Path) -> int:
    """Writes one file per rank, ``trace.RANK.et``; returns the number of nodes written.

    Raises:
        MissingCapabilityError: The package ``protobuf`` is not installed.
    """
    require_extra("chakra", "export --to chakra")
    write: Callable[[Any, IO[bytes]], None] = importlib.import_module(
        "google.protobuf.proto"
    ).serialize_length_prefixed
    return _write(trace, folder, "et", write)


def write_json_of_each_rank(trace: Trace, folder: Path) -> int:
    """Writes ``trace.RANK.et.json``, one object behind the other as ``chakra_jsonizer`` does.

    Returns:
        The number of nodes written.

    Raises:
        MissingCapabilityError: The package ``protobuf`` is not installed.
    """
    require_extra("chakra", "export --to chakra-json")
    as_json: Any = importlib.import_module("google.protobuf.json_format").MessageToJson

    def write(message: Any, file: IO[bytes]) -> None:
        file.write(as_json(message).encode() + b"\n")

    return _write(trace, folder, "et.json", write)


def _write(trace: Trace, folder: Path, suffix: str, write: Callable[[Any, IO[bytes]], None]) -> int:
    written = 0
    for rank in trace.ranks:
        table = trace.events(rank)
        pieces = _pieces(table)
        _connect(pieces)
        with (folder / f"trace.{rank}.{suffix}").open("wb") as file:
            write(_metadata(trace, rank, table, pieces), file)
            for number, piece in enumerate(pieces):
                write(_node(number, piece, trace.origin_ns), file)
        written += len(pieces)
    return written


def _pieces(table: pa.Table) -> list[_Piece]:
    """The nodes of a rank, by start."""
    ends = ends_of(table)
    kinds = table["kind"].to_pylist()
    events: list[Event] = table.select(list(_COLUMNS)).to_pylist()
    found = [
        _Piece(event["start_ns"], int(end), event)
        for event, end in zip(events, ends.tolist(), strict=True)
        if event["kind"] == "message"
    ]
    # A host's piece is cut where it hands over work, so that the work can depend on its first part.
    handed_over = sorted(event["enqueue_ns"] for event in events if event["enqueue_ns"] is not None)
    awaitable = sorted((piece.end_ns, piece.event["id"]) for piece in found if _has_id(piece))
    for track in tracks_of(table, ends):
        rows = [
            row
            for row in track.rows.tolist()
            if kinds[row] == "wait" or kinds[row] in _HOST_KINDS or kinds[row] in _DEVICE_KINDS
        ]
        found += _innermost(rows, events, ends.tolist(), handed_over, awaitable)
    found.sort(key=lambda piece: (piece.start_ns, piece.end_ns))
    return found


def _has_id(piece: _Piece) -> bool:
    return piece.event["id"] is not None


def _innermost(
    rows: Sequence[int],
    events: Sequence[Event],
    ends: Sequence[int],
    cuts: Sequence[int],
    awaitable: Sequence[tuple[int, int]],
) -> Iterator[_Piece]:
    """Cuts nested intervals into pieces of the innermost one; waits leave gaps."""
    stack: list[int] = []
    awaited: int | None = None
    at = 0

    def until(time: int) -> Iterator[_Piece]:
        nonlocal at, awaited
        if stack and time > at and events[stack[-1]]["kind"] != "wait":
            event = events[stack[-1]]
            inside = (
                cuts[bisect_right(cuts, at) : bisect_left(cuts, time)]
                if event["kind"] in _HOST_KINDS
                else ()
            )
            for end in (*dict.fromkeys(inside), time):
                yield _Piece(at, end, event, awaited)
                at, awaited = end, None
        at = max(at, time)

    def close() -> Iterator[_Piece]:
        nonlocal awaited
        row = stack[-1]
        yield from until(ends[row])
        stack.pop()
        if events[row]["kind"] == "wait":
            awaited = _message_of(events[row], ends[row], awaitable)

    for row in rows:
        start = events[row]["start_ns"]
        while stack and ends[stack[-1]] <= start:
            yield from close()
        yield from until(start)
        stack.append(row)
    while stack:
        yield from close()


def _message_of(wait: Event, end: int, awaitable: Sequence[tuple[int, int]]) -> int | None:
    """The message that a wait was for: the one it names, else the last that was over at its end."""
    if wait["parent"] is not None:
        return int(wait["parent"])
    place = bisect_right(awaitable, (end, 1 << 62)) - 1
    return awaitable[place][1] if place >= 0 else None


class _Ended:
    """Finds the last of some nodes that was over at a time."""

    def __init__(self, pieces: Sequence[_Piece], numbers: Sequence[int]) -> None:
        self._ends = sorted((pieces[number].end_ns, number) for number in numbers)

    def at(self, time: int, before: int) -> int | None:
        """The number of the node; less than `before`, which is that of a node that began then.

        Nodes are numbered by start: one that was over earlier has a smaller number, and of those
        that end at the same time, only an empty one can have a larger number.
        """
        place = bisect_right(self._ends, (time, before - 1)) - 1
        return self._ends[place][1] if place >= 0 else None


def _connect(pieces: Sequence[_Piece]) -> None:
    """Fills in the dependencies; each is on a node with a smaller number."""
    lanes: dict[Any, list[int]] = defaultdict(list)
    for number, piece in enumerate(pieces):
        lanes[_lane_of(piece)].append(number)
    ended = {lane: _Ended(pieces, numbers) for lane, numbers in lanes.items()}
    host = _Ended(pieces, [number for number, piece in enumerate(pieces) if piece.on_host])
    messages_by_id = {
        piece.event["id"]: number for number, piece in enumerate(pieces) if piece.is_message
    }
    for number, piece in enumerate(pieces):
        deps = [ended[_lane_of(piece)].at(piece.start_ns, number)]
        if piece.awaited is not None:
            deps.append(messages_by_id.get(piece.awaited))
        if not piece.on_host:
            enqueued = piece.event["enqueue_ns"]
            launched = piece.start_ns if enqueued is None else min(enqueued, piece.start_ns)
            deps.append(host.at(launched, number))
        piece.deps = {dep for dep in deps if dep is not None and dep < number}


def _lane_of(piece: _Piece) -> tuple[bool, Any]:
    return piece.is_message, piece.event["group" if piece.is_message else "lane"]


def _metadata(trace: Trace, rank: int, table: pa.Table, pieces: Sequence[_Piece]) -> Any:
    metadata = messages().metadata(version=VERSION)
    _add(metadata, "rank", rank)
    # Times of all ranks are on one clock: the trace was aligned when it was opened.
    _add(metadata, "clock_domain", "aligned by ddltrace")
    groups = table["group"].combine_chunks().dictionary.to_pylist()
    for name in groups:
        if members := trace.group_ranks(name, rank):
            _add_list(metadata, f"pg_ranks/{name}", "int64_list", members)
    spans = [
        (event, end)
        for event, end in zip(
            table.select(["kind", "name", "step", "start_ns", "parent"]).to_pylist(),
            ends_of(table).tolist(),
            strict=True,
        )
        if event["kind"] in _SPANS
    ]
    starts = [(event["start_ns"] - trace.origin_ns) // 1000 for event, _ in spans]
    stops = [(end - trace.origin_ns) // 1000 for _, end in spans]
    steps = [-1 if event["step"] is None else event["step"] for event, _ in spans]
    numbers = {p.event["id"]: number for number, p in enumerate(pieces) if p.is_message}
    awaited = [
        -1 if event["parent"] is None else numbers.get(event["parent"], -1) for event, _ in spans
    ]
    _add_list(metadata, "span_kinds", "string_list", [event["kind"] for event, _ in spans])
    _add_list(metadata, "span_names", "string_list", [event["name"] or "" for event, _ in spans])
    _add_list(metadata, "span_steps", "int64_list", steps)
    _add_list(metadata, "span_nodes", "int64_list", awaited)
    _add_list(metadata, "span_start_micros", "int64_list", starts)
    durations = [stop - start for start, stop in zip(starts, stops, strict=True)]
    _add_list(metadata, "span_duration_micros", "int64_list", durations)
    return metadata


def _node(number: int, piece: _Piece, origin_ns: int) -> Any:
    event = piece.event
    start = (piece.start_ns - origin_ns) // 1000
    node = messages().node(
        id=number,
        name=event["name"] or event["op"] or event["kind"],
        data_deps=sorted(piece.deps),
        start_time_micros=start,
        duration_micros=(piece.end_ns - origin_ns) // 1000 - start,
    )
    _add(node, "is_cpu_op", piece.on_host)
    for key in ("step", "phase"):
        _add(node, key, event[key])
    if piece.is_message:
        _describe_message(node, event)
    else:
        node.type = MEM_LOAD if event["kind"] == "copy" else COMP
        _add(node, "lane", event["lane"])
        _add(node, "kind", event["kind"])
        if event["kind"] == "copy":
            _add(node, "tensor_size", event["bytes"])
    return node


def _describe_message(node: Any, event: Event) -> None:
    op = event["op"]
    size = event["out_bytes"] if op == "recv" else event["bytes"]
    _add(node, "comm_size", size)
    _add(node, "pg_name", event["group"])
    if op in P2P_OPS:
        node.type = SEND if op == "send" else RECV
        _add(node, "comm_dst" if op == "send" else "comm_src", event["peer"])
        _add(node, "comm_tag", event["tag"])
    else:
        node.type = COLLECTIVE
        if op in _TYPE_OF:
            _add(node, "comm_type", _TYPE_OF[op])
        else:
            _add(node, "op", op)
        _add(node, "root", event["peer"])
        _add(node, "out_bytes", event["out_bytes"])
    for key in ("seq", "dtype", "status"):
        _add(node, key, event[key])


def _add(message: Any, name: str, value: Any) -> None:
    """Adds an attribute, unless its value is not known."""
    if value is None:
        return
    if isinstance(value, bool):
        message.attr.add(name=name, bool_val=value)
    elif isinstance(value, int):
        message.attr.add(name=name, int64_val=value)
    else:
        message.attr.add(name=name, string_val=value)


def _add_list(message: Any, name: str, kind: str, values: Sequence[Any]) -> None:
    attribute = message.attr.add(name=name)
    getattr(attribute, kind).values.extend(values)
