"""Execution traces of MLCommons Chakra: a graph of computation and communication per rank.

A file is of one rank (``NAME.RANK.et``), in protobuf or as the JSON that Chakra's own tool
``chakra_jsonizer`` makes of it. Chakra's converter writes durations and dependencies, but no
start times: such nodes are laid out by their dependencies, each rank on its own.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.chakra.messages import (
    COLLECTIVE,
    COLLECTIVES,
    COMP,
    MEM_LOAD,
    MEM_STORE,
    NODE_TYPES,
    RECV,
    SEND,
    Frames,
    attributes,
    begins_like_a_trace,
    messages,
)
from ddltrace.analyzer.importers.communication import MAX_INT32, count, public_op
from ddltrace.analyzer.importers.imported import (
    MAX_TIME_NS,
    ImportedTrace,
    Row,
    table_of,
    without_time,
)
from ddltrace.analyzer.importers.memory_limit import check_memory
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.rank_files import MAX_RANK, assign_ranks
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.optional_packages import require_extra
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import PHASES, STATUSES
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "chakra"

_JSON_MARKS: Final = re.compile(
    rb'"type"\s*:\s*"(?:COMP|COMM_COLL|COMM_SEND|COMM_RECV|MEM_LOAD|MEM_STORE)_NODE"'
    rb'|"workload_graph"\s*:|"schema"\s*:\s*"[\d.]+-chakra'
)
_ATTRIBUTES: Final = (
    *("is_cpu_op", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "tensor_size"),
)
"""Fields of a node of a workload graph besides name, type, dependencies and duration."""

_OBJECT_BYTES: Final = 600
"""Memory of a JSON object of few entries."""

_NODE_TYPES: Final = {
    key: number for number, name in enumerate(NODE_TYPES) for key in (name, str(number))
}
_READ: Final = frozenset({MEM_LOAD, MEM_STORE, COMP, SEND, RECV, COLLECTIVE})
_NODE_BYTES: Final = 700
"""Memory of one node and its row: 620 measured, with a name of its own and nine attributes."""

_JSON_TIMES: Final = 5
"""Memory of JSON text, as bytes and as characters of up to four bytes, in multiples of the file."""

_MAX_JSON: Final = 1 << 30
_MAX_SPANS: Final = 1 << 22


@dataclass(slots=True)
class _Node:
    """A node and the event that it becomes; times in nanoseconds.

    Attributes:
        id: Its number in the file.
        deps: Nodes that it waits for (data dependencies).
        parents: Its control dependencies: Chakra's converter writes the calling operator there.
        duration_ns: Its duration.
        row: The event.
    """

    id: int
    deps: tuple[int, ...]
    parents: tuple[int, ...]
    duration_ns: int
    row: Row


@dataclass
class _File:
    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    nodes: list[_Node] = field(default_factory=list)
    damaged: int = 0
    damage: str | None = None


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is an execution trace."""
    return _JSON_MARKS.search(head) is not None or begins_like_a_trace(head)


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the files of a job, one per rank.

    Raises:
        TraceError: There is no node of computation or communication with a time.
        MissingCapabilityError: The package ``protobuf`` is not installed.
    """
    require_extra("chakra", "reading a Chakra execution trace")
    run = RunInfo(status="complete", level="op", source=NAME)
    files = [_read_file(path) for path in paths]
    stated = [count(file.metadata.get("rank"), MAX_RANK) for file in files]
    ranks = assign_ranks(stated, paths, run.notes)
    for file in files:
        _note_damage(file, run)
    files_of = dict(zip(ranks, files, strict=True))
    has_starts = _place_in_time(files, run.notes)
    _leave_out_untimed(files, run.notes, has_starts=has_starts)
    world = max(ranks) + 1
    tables = {}
    for rank in sorted(ranks):
        file = files_of[rank]
        spans = _spans(file)
        # Parts of a phase are not phases: the metadata contains the complete ones.
        rows = [node.row for node in file.nodes if node.row.kind != "phase"] + spans
        if not rows:
            continue
        rows.sort(key=lambda row: row.start_ns)
        domain = file.metadata.get("clock_domain")
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            world_size=world,
            status="complete",
            level="op",
            clock_domain=clean(domain, 200) if isinstance(domain, str) else f"rank {rank}",
            groups=_groups(file),
            events=len(rows),
        )
        run.ranks.append(info)
        tables[info.segment] = table_of(rows)
    if silent := world - len(tables):
        run.notes.append(
            f"{silent} of {world} ranks {agreeing(silent, 'has')} no nodes that can be read"
        )
        run.status = "partial"
    if not any(row.kind == "step" for file in files for row in _spans(file)):
        run.notes.append("the files contain no training steps")
    return number_messages(run, tables)


def _note_damage(file: _File, run: RunInfo) -> None:
    if file.damage is not None:
        run.notes.append(f"{clean(file.path.name, 100)!r}: {file.damage}")
    if file.damaged:
        run.notes.append(
            f"{clean(file.path.name, 100)!r}: {counted(file.damaged, 'node', 'is')} damaged and "
            "left out"
        )
    if file.damage is not None or file.damaged:
        run.status = "partial"


def _read_file(path: Path) -> _File:
    file = _File(path)
    blocks = Blocks(path)
    if begins_like_a_trace(blocks.head(1 << 18)):
        decoded = _protobuf_messages(file, blocks)
    else:
        decoded = _json_messages(file, blocks)
    for message in decoded:
        if message.DESCRIPTOR.name == "GlobalMetadata":
            file.metadata = attributes(message)
        elif message.type in _READ:
            node = _node(message)
            if node is None:
                file.damaged += 1
            else:
                file.nodes.append(node)
                if not len(file.nodes) % 4096:
                    needed = len(file.nodes) * _NODE_BYTES
                    check_memory(path, needed, blocks.read_bytes)
    return file


def _protobuf_messages(file: _File, blocks: Blocks) -> Iterator[Any]:
    errors: Any = importlib.import_module("google.protobuf.message")
    frames = Frames(blocks)
    for number, encoded in enumerate(frames):
        message = messages().node() if number else messages().metadata()
        try:
            message.ParseFromString(encoded)
        except (errors.DecodeError, ValueError):
            file.damaged += 1
            continue
        yield message
    file.damage = frames.damage


def _json_messages(file: _File, blocks: Blocks) -> Iterator[Any]:
    """The objects of a JSON file, which are concatenated."""
    json_format: Any = importlib.import_module("google.protobuf.json_format")
    content = bytearray()
    for block in blocks:
        content += block
        if len(content) > _MAX_JSON:
            raise TraceError(f"{file.path} holds more than 1 GB of JSON: read its .et file")
        check_memory(file.path, _JSON_TIMES * len(content), len(content))
    file.damage = blocks.damage
    text = content.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s,]*")
    at = len(space.match(text)[0])  # type: ignore[index]
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            file.damage = file.damage or "the JSON is damaged: the rest is not read"
            return
        at = space.match(text, at).end()  # type: ignore[union-attr]
        if isinstance(value, dict) and isinstance(value.get("workload_graph"), list):
            check_memory(
                file.path,
                _JSON_TIMES * len(content) + _OBJECT_BYTES * content.count(b"{"),
                len(content),
            )
            yield from _workload_graph(file, value["workload_graph"])
            continue
        if isinstance(value, dict) and isinstance(value.get("nodes"), list):
            raise TraceError(
                f"{file.path} is of PyTorch's ExecutionTraceObserver, which records no times: "
                "read the profiler's trace, or what Chakra's converter makes of both"
            )
        is_node = isinstance(value, dict) and "type" in value
        # protobuf fails in its own code where a type is neither a number nor a valid name.
        kind = _NODE_TYPES.get(str(value.pop("type"))) if is_node else None
        if is_node and kind is None:
            file.damaged += 1
            continue
        message = messages().node() if is_node else messages().metadata()
        try:
            json_format.ParseDict(value, message, ignore_unknown_fields=True)
        # Values of a wrong type make the library raise more than its own error.
        except (json_format.ParseError, TypeError, ValueError, AttributeError, RecursionError):
            file.damaged += 1
            continue
        if kind is not None:
            message.type = kind
        yield message


def _workload_graph(file: _File, graph: list[Any]) -> Iterator[Any]:
    """The nodes of a workload graph, the JSON that Chakra's feeder reads."""
    json_format: Any = importlib.import_module("google.protobuf.json_format")
    values = {bool: "boolVal", int: "int64Val", str: "stringVal"}
    for each in graph:
        try:
            node = {
                "id": each["Id"],
                "name": each.get("Name", ""),
                "dataDeps": each.get("data_deps", []),
                "durationMicros": each.get("runtime", 0),
                "attr": [
                    {"name": name, values[type(each[name])]: each[name]}
                    for name in _ATTRIBUTES
                    if name in each
                ],
            }
            message = json_format.ParseDict(node, messages().node())
            message.type = _NODE_TYPES[str(each["NodeType"])]
        except (
            *(json_format.ParseError, TypeError, ValueError, AttributeError, RecursionError),
            KeyError,
        ):
            file.damaged += 1
            continue
        yield message


def _node(message: Any) -> _Node | None:
    """A node as an event, not yet placed if it has no start; None if its times are damage."""
    start, duration = message.start_time_micros * 1000, message.duration_micros * 1000
    if start >= MAX_TIME_NS or duration >= MAX_TIME_NS:
        return None
    values = attributes(message)
    row = Row(start, start + duration, "host", clean(message.name) or None)
    row.step = count(values.get("step"), MAX_INT32)
    phase = values.get("phase")
    row.phase = phase if isinstance(phase, str) and phase in PHASES else None
    if message.type in (SEND, RECV, COLLECTIVE):
        _describe_message(row, message.type, values)
    else:
        on_host = values.get("is_cpu_op")
        # Chakra's own feeder treats a node without this attribute as device work.
        if not on_host:
            row.kind = "kernel" if message.type == COMP else "copy"
        elif values.get("kind") in ("layer", "data", "phase"):
            # As this project's exporter writes it.
            row.kind = values["kind"]
        row.lane = _lane(values, on_host=bool(on_host))
        row.bytes = count(values.get("tensor_size")) if message.type != COMP else None
    return _Node(message.id, tuple(message.data_deps), tuple(message.ctrl_deps), duration, row)


def _lane(values: dict[str, Any], *, on_host: bool) -> str:
    named = values.get("lane")
    if isinstance(named, str) and named:
        return sys.intern(clean(named, 200))
    if on_host:
        thread = count(values.get("tid"))
        return "main" if thread is None else f"thread-{thread}"
    return sys.intern(f"stream-{count(values.get('stream')) or 0}")


def _describe_message(row: Row, kind: int, values: dict[str, Any]) -> None:
    size = count(values.get("comm_size"))
    group = values.get("pg_name")
    row.kind = "message"
    row.group = sys.intern(clean(group, 200)) if isinstance(group, str) and group else "0"
    row.lane = sys.intern(f"comm/{row.group}")
    row.status = "ok"
    row.seq = count(values.get("seq"))
    row.bytes = size
    row.out_bytes = count(values.get("out_bytes"))
    if kind == COLLECTIVE:
        number = count(values.get("comm_type"))
        named = values.get("op")
        row.op = COLLECTIVES.get(-1 if number is None else number)
        if row.op is None:
            row.op = clean(named, 60) if isinstance(named, str) and named else _op_in(row.name)
        row.peer = count(values.get("root"), MAX_INT32)
    else:
        row.op = "send" if kind == SEND else "recv"
        row.peer = count(values.get("comm_dst" if kind == SEND else "comm_src"), MAX_INT32)
        row.tag = count(values.get("comm_tag"), MAX_INT32)
        if kind == RECV:
            row.bytes, row.out_bytes = None, size
    dtype = values.get("dtype")
    row.dtype = sys.intern(clean(dtype, 60)) if isinstance(dtype, str) and dtype else None
    status = values.get("status")
    if isinstance(status, str) and status in STATUSES:
        row.status = status
    if row.status == "open":
        row.end_ns = None


def _op_in(name: str | None) -> str:
    return public_op(name or "") or clean(name or "collective", 60)


def _place_in_time(files: list[_File], notes: list[str]) -> bool:
    """Lays nodes out by their dependencies if no file contains start times.

    Returns:
        Whether files contain start times.

    Raises:
        TraceError: There are no nodes, or they have neither starts nor durations.
    """
    nodes = [node for file in files for node in file.nodes]
    if not nodes:
        raise TraceError(f"{files[0].path} holds no node of computation or communication")
    _leave_ends_open(nodes, notes)
    starts = [node.row.start_ns for node in nodes if node.row.start_ns]
    if starts:
        _leave_out_unplaced(files, notes)
        return True
    if not any(node.duration_ns for node in nodes):
        raise TraceError(
            f"{files[0].path}: no node has a start time or a duration: this is a workload for a "
            "simulator, not a recording"
        )
    if len(nodes) == len(files):
        return False  # one node on each rank may start at zero
    left_out = 0
    for file in files:
        placed = _lay_out(file.nodes)
        left_out += len(file.nodes) - len(placed)
        file.nodes = placed
    notes.append(
        "the files have durations, but no start times: nodes are laid out by their dependencies, "
        "each rank on its own; positions in time and waits between ranks are not measured"
    )
    if left_out:
        notes.append(f"{counted(left_out, 'node')} in circles of dependencies left out")
    return False


def _leave_ends_open(nodes: list[_Node], notes: list[str]) -> None:
    """Leaves the end of messages without a duration unknown: none takes no time."""
    messages = [node for node in nodes if node.row.kind == "message"]
    untimed = [node for node in messages if not node.duration_ns]
    for node in untimed:
        node.row.end_ns = None
    if untimed:
        notes.append(
            f"{len(untimed)} of {len(messages)} messages {agreeing(len(untimed), 'has')} no "
            "duration: their ends are not known"
        )


def _leave_out_untimed(files: list[_File], notes: list[str], *, has_starts: bool) -> None:
    """Leaves out device work whose time is not known.

    Raises:
        TraceError: Nothing is left.
    """
    nodes = [node for file in files for node in file.nodes]
    work = [node for node in nodes if node.row.kind in ("kernel", "copy")]
    messages = [node for node in nodes if node.row.kind == "message"]
    if work and not any(node.duration_ns for node in work):
        why = "computations have no duration"
    elif not has_starts and not all(node.duration_ns for node in messages):
        why = "messages have no duration and nothing has a start time"
    else:
        if lacking := sum(not node.duration_ns for node in work):
            notes.append(
                f"{lacking} of {len(work)} computations {agreeing(lacking, 'has')} no duration, or "
                f"less than 1 µs, and {agreeing(lacking, 'counts')} as 0"
            )
        return
    if len(work) == len(nodes):
        raise TraceError(f"{files[0].path}: {why}: this is a workload, not a recording")
    for file in files:
        file.nodes = [node for node in file.nodes if node.row.kind not in ("kernel", "copy")]
    notes.append(f"{why}: computations are left out, and no share of the time can be given")


def _leave_out_unplaced(files: list[_File], notes: list[str]) -> None:
    """Leaves out nodes without a start, which have 0 where the clock does not begin at zero."""
    nodes = [node for file in files for node in file.nodes]
    unknown = without_time(
        np.array([node.row.start_ns for node in nodes]),
        np.array([node.duration_ns for node in nodes]),
        may_begin_at_0=True,
    )
    lost = {id(nodes[place]) for place in np.flatnonzero(unknown).tolist()}
    for file in files:
        file.nodes = [node for node in file.nodes if id(node) not in lost]
    if unplaced := len(lost):
        notes.append(f"{counted(unplaced, 'node')} without a start time left out")


def _lay_out(nodes: list[_Node]) -> list[_Node]:
    """Starts each node when all its dependencies have ended; nodes in cycles are left out.

    As in Chakra's feeder, data dependencies count. Control dependencies count where a file has no
    others.
    """
    by_id = {node.id: node for node in nodes}
    by_data = any(node.deps for node in nodes)
    waiting: dict[int, int] = {}
    followers: dict[int, list[_Node]] = defaultdict(list)
    for node in by_id.values():
        deps = {dep for dep in (node.deps if by_data else node.parents) if dep in by_id}
        waiting[node.id] = len(deps)
        for dep in deps:
            followers[dep].append(node)
    ready = deque(node for node in by_id.values() if not waiting[node.id])
    placed = []
    while ready:
        node = ready.popleft()
        end = min(node.row.start_ns + node.duration_ns, MAX_TIME_NS)
        node.row.end_ns = None if node.row.end_ns is None else end
        placed.append(node)
        for each in followers[node.id]:
            each.row.start_ns = max(each.row.start_ns, end)
            waiting[each.id] -= 1
            if not waiting[each.id]:
                ready.append(each)
    return placed


def _spans(file: _File) -> list[Row]:
    """Steps, phases and waits, which this project's exporter writes into the metadata."""
    lists = [
        file.metadata.get(f"span_{name}")
        for name in ("kinds", "names", "steps", "nodes", "start_micros", "duration_micros")
    ]
    if not all(isinstance(each, list) for each in lists):
        return []
    rows: list[Row] = []
    places = _message_places(file)
    for kind, name, step, node, start, duration in zip(*lists, strict=False):
        known = count(start), count(duration), count(step, MAX_INT32)
        if kind not in ("step", "phase", "wait") or known[0] is None or known[1] is None:
            continue
        if max(known[0], known[1]) >= MAX_TIME_NS // 1000 or len(rows) >= _MAX_SPANS:
            continue
        begin = known[0] * 1000
        row = Row(begin, begin + known[1] * 1000, kind, clean(name), "main", known[2])
        if kind == "wait" and isinstance(node, int):
            row.parent = places.get(node)
        row.phase = row.name if kind == "phase" and row.name in PHASES else None
        rows.append(row)
    return rows


def _message_places(file: _File) -> dict[int, int]:
    """The place of each message's node among the messages by start, which becomes its ``id``."""
    nodes = [node for node in file.nodes if node.row.kind == "message"]
    nodes.sort(key=lambda node: node.row.start_ns)
    return {node.id: place for place, node in enumerate(nodes)}


def _groups(file: _File) -> list[GroupInfo]:
    names = dict.fromkeys(node.row.group for node in file.nodes if node.row.group is not None)
    infos = []
    for name in names:
        members = file.metadata.get(f"pg_ranks/{name}")
        known = [count(each, MAX_RANK) for each in members] if isinstance(members, list) else []
        ranks = tuple(each for each in known if each is not None)
        infos.append(GroupInfo(name, "", "", ranks if len(ranks) == len(known) else ()))
    return infos
