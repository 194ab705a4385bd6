"""Horovod timelines: one Chrome trace, written by rank 0, with a process per tensor.

For each tensor a ``NEGOTIATE_*`` interval collects a tick from every rank that is ready, then
the operation follows with its activities inside. Once Horovod knows an operation from its cache
(HOROVOD_CACHE_CAPACITY), the interval has no ticks any more. The shape at an operation's end is
that of its output. Operations that are copied into the fusion buffer together are one message with
the bytes of all.

An operation becomes two messages. ``negotiate`` begins on each rank when that rank is ready, and
ends with the negotiation: ranks wait for each other there. The operation's own message is what the
communication library does (``MPI_*``, ``NCCL_*``, ``GLOO_*``, ...), or the whole operation where no
such activity is recorded. Between them lie queueing and copies (``QUEUE``, ``WAIT_FOR_DATA``,
``WAIT_FOR_OTHER_TENSOR_DATA``, ``MEMCPY_*``), which are not communication.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ddltrace.analyzer.importers.chrome.chrome_reader import Interval, Recording, read_recording
from ddltrace.analyzer.importers.chrome.trace_events import INTERVAL_BYTES, EventFile
from ddltrace.analyzer.importers.communication import (
    count,
    element_type,
    elements_of,
    public_op,
    size_of,
)
from ddltrace.analyzer.importers.imported import ImportedTrace, Row, table_of
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo
from ddltrace.tracer.trace.trace_files import segment_name

NAME: Final = "horovod"

_MARKS: Final = re.compile(rb'"NEGOTIATE_[A-Z]+"|"CYCLE_START"|start_time_since_epoch_in_micros')
_NEGOTIATION: Final = "NEGOTIATE_"
_FUSING: Final = "MEMCPY_IN_FUSION_BUFFER"
_LIBRARY: Final = re.compile(r"(MPI|NCCL|RCCL|GLOO|CCL|ONECCL|HCCL|XCCL|DDL|MLSL|ADASUM)_")
_NEGOTIATE: Final = "negotiate"
_MOST_ROWS: Final = 2_000_000
"""With more messages in all, operations from Horovod's cache are on rank 0 only."""

_TICK: Final = re.compile(r"\d{1,6}\Z")
_GROUP: Final = "horovod"
_NEGOTIATIONS: Final = "horovod/negotiation"
_MAX_RANKS: Final = 1 << 16
_RESHAPING: Final = frozenset({"all_gather", "all_to_all", "reduce_scatter"})
"""Operations whose input size does not follow from the shape of their output."""


def recognizes(head: bytes) -> bool:
    """Whether a file with this head is a Horovod timeline."""
    return _MARKS.search(head) is not None


@dataclass
class _Operation:
    """One operation on one tensor: when each rank was ready, and the activities."""

    tensor: Any
    ready: dict[int, int] = field(default_factory=dict)
    negotiation: Interval | None = None
    main: Interval | None = None
    activities: list[Interval] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether its end is recorded."""
        return self.main is not None and self.main.end_ns is not None

    @property
    def transfer(self) -> tuple[int, int | None] | None:
        """When the communication library works on it; None if it has not begun."""
        if self.main is None:
            return None
        library = [each for each in self.activities if _LIBRARY.match(each.name)]
        if not library:
            return self.main.start_ns, self.main.end_ns
        ends = [each.end_ns for each in library if each.end_ns is not None]
        return (
            min(each.start_ns for each in library),
            max(ends) if len(ends) == len(library) else self.main.end_ns,
        )


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads a timeline.

    A negotiation begins when its rank was ready, as rank 0 heard of it. All else is rank 0's,
    since no other rank wrote anything: Horovod executes each operation on all ranks together.

    Raises:
        TraceError: There are several files, or no operation is found.
    """
    if len(paths) > 1:
        raise TraceError(f"{paths[0].parent} holds {len(paths)} Horovod timelines: choose one")
    path = paths[0]
    file = EventFile(path, INTERVAL_BYTES)
    recording = read_recording(file)
    operations, twice = _operations(recording)
    heard = sorted({0}.union(*(operation.ready for operation in operations)))
    left_out = [each for each in operations if twice and not each.is_complete]
    operations = [each for each in operations if not twice or each.is_complete]
    if not operations:
        raise TraceError(f"{path} is a Horovod timeline without a single operation")
    tensors = _tensors(operations, recording)
    world = heard[-1] + 1
    everywhere = heard if len(heard) * len(operations) <= _MOST_ROWS else [0]
    rows: dict[int, list[Row]] = defaultdict(list)
    for number, together in enumerate(_fused(operations, recording)):
        _add_messages(
            number, together, tensors, rows, everywhere=everywhere, epoch_ns=recording.epoch_ns
        )
    for operation in operations:
        _add_activities(operation, tensors[operation.tensor], rows[0], recording.epoch_ns)
    run = RunInfo(status="complete", level="comm", source=NAME)
    run.notes += [
        "only rank 0 writes a Horovod timeline: of other ranks it records when they were ready, "
        "as rank 0 heard of it; the times of their operations are rank 0's",
        f"{counted(world, 'rank', 'was')} heard of; steps, phases and computation are not in the "
        "timeline",
    ]
    if unready := sum(not operation.ready for operation in operations):
        run.notes.append(
            f"{unready} of {len(operations)} operations {agreeing(unready, 'was')} known to "
            "Horovod's cache: when other ranks were ready for them is not in the timeline "
            "(HOROVOD_CACHE_CAPACITY=0 records it)"
        )
    if twice:
        run.notes.append(
            f"{counted(twice, 'operation', 'begins')} again before the end: several processes "
            f"wrote into this file, and {counted(len(left_out), 'operation')} without an end left "
            "out (give each job a timeline of its own)"
        )
    losses = file.losses()
    if recording.left_out:
        losses.append(f"{counted(recording.left_out, 'event')} without a usable time left out")
    run.notes += losses
    if losses or twice:
        run.status = "partial"
    tables = {}
    for rank in sorted(rows):
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=0),
            world_size=world,
            status="complete",
            level="comm",
            clock_domain="rank 0",
            tensors=list(tensors.values()),
            groups=[
                GroupInfo(name, text, "", tuple(range(world)))
                for name, text in (
                    (_GROUP, "all ranks"),
                    (_NEGOTIATIONS, "all ranks, until they are ready"),
                )
            ],
            events=len(rows[rank]),
        )
        run.ranks.append(info)
        tables[info.segment] = table_of(rows[rank])
    return number_messages(run, tables)


def _operations(recording: Recording) -> tuple[list[_Operation], int]:
    """Groups the intervals of each tensor's process into operations, as the file orders them.

    Returns:
        The operations, and how many negotiations begin inside another one, which one process
        never writes.
    """
    twice = 0
    by_tensor: dict[Any, list[Interval]] = defaultdict(list)
    for interval in recording.intervals:
        by_tensor[interval.track[0]].append(interval)
    operations = []
    for tensor, intervals in by_tensor.items():
        current, outer = _Operation(tensor), 0
        for interval in intervals:
            if interval.name.startswith(_NEGOTIATION):
                outer = interval.depth  # what is still open around it is never closed
                twice += outer > 0
                current = _Operation(tensor, negotiation=interval)
                operations.append(current)
            elif _TICK.match(interval.name) and interval.start_ns == interval.end_ns:
                if int(interval.name) < _MAX_RANKS:
                    current.ready.setdefault(int(interval.name), interval.start_ns)
            elif interval.depth <= outer:
                if current.main is not None or current.negotiation is None:
                    # Agreed on without a negotiation: Horovod remembers repeated operations.
                    current = _Operation(tensor)
                    operations.append(current)
                current.main = interval
            else:
                current.activities.append(interval)
    return sorted(operations, key=_begin), twice


def _fused(operations: list[_Operation], recording: Recording) -> list[list[_Operation]]:
    """The operations of each message, in order of time.

    Horovod writes the beginnings of the copies of all tensors of a message one behind the other,
    and then what it does with the buffer.
    """
    copied = {
        id(activity): operation
        for operation in operations
        for activity in operation.activities
        if activity.name == _FUSING
    }
    leader: dict[int, _Operation] = {}
    current: _Operation | None = None
    for interval in recording.intervals:
        if id(interval) in copied:
            operation = copied[id(interval)]
            current = current or operation
            leader[id(operation)] = current
        elif interval.depth and not _TICK.match(interval.name):
            current = None
    messages: dict[int, list[_Operation]] = defaultdict(list)
    for operation in operations:
        messages[id(leader.get(id(operation), operation))].append(operation)
    return list(messages.values())


def _begin(operation: _Operation) -> int:
    first = operation.negotiation or operation.main
    return first.start_ns if first is not None else 0


def _tensors(operations: list[_Operation], recording: Recording) -> dict[Any, TensorInfo]:
    tensors: dict[Any, TensorInfo] = {}
    for operation in operations:
        args = operation.main.args if operation.main is not None else None
        known = tensors.get(operation.tensor)
        if known is not None and (known.dtype or args is None):
            continue
        dtype, width = element_type(args.dtype if args is not None else None)
        shape = _shape(args.shape if args is not None else None)
        name = recording.processes.get(operation.tensor, f"tensor {operation.tensor}")
        tensors[operation.tensor] = TensorInfo(
            id=known.id if known is not None else len(tensors),
            name=clean(name),
            shape=shape,
            dtype=dtype or "",
            bytes=(size_of(elements_of(list(shape)), width) or 0) if dtype else 0,
        )
    return tensors


def _shape(text: Any) -> tuple[int, ...]:
    numbers = re.findall(r"\d{1,12}", text) if isinstance(text, str) else []
    return tuple(int(number) for number in numbers[:32])


def _add_messages(
    number: int,
    together: list[_Operation],
    tensors: dict[Any, TensorInfo],
    rows: dict[int, list[Row]],
    *,
    everywhere: list[int],
    epoch_ns: int,
) -> None:
    """Adds the negotiation and the message that some operations are.

    Args:
        number: Its place among all.
        together: The operations; each rank negotiates until it is ready for the last of them.
        tensors: Process in the timeline -> its tensor.
        rows: Receives the rows of each rank.
        everywhere: The ranks of a message whose negotiation is not recorded.
        epoch_ns: Unix time of the file's time 0.
    """
    first = together[0]
    named = first.main if first.main is not None else first.negotiation
    assert named is not None  # an operation begins with one of the two
    plain = named.name.removeprefix(_NEGOTIATION)
    # Adasum adds gradients up in another way, over the same ranks with the same result sizes.
    op = "all_reduce" if plain == "ADASUM" else public_op(plain) or clean(plain.lower(), 60)
    carried = [tensors[operation.tensor] for operation in together]
    size = (
        count(sum(each.bytes for each in carried)) if all(each.dtype for each in carried) else None
    )
    dtypes = {each.dtype for each in carried}
    name = carried[0].name + (f" + {len(carried) - 1}" if len(carried) > 1 else "")
    ready = _ready(together)
    negotiations = [each.negotiation for each in together if each.negotiation is not None]
    if len(negotiations) == len(together) and any(each.ready for each in together):
        agreed = [each.end_ns for each in negotiations if each.end_ns is not None]
        end = max(agreed) if len(agreed) == len(negotiations) else None
        for rank, since in ready.items():
            rows[rank].append(
                Row(
                    start_ns=since + epoch_ns,
                    end_ns=None if end is None else max(end, since) + epoch_ns,
                    kind="message",
                    name=name,
                    lane=f"comm/{_NEGOTIATIONS}",
                    op=_NEGOTIATE,
                    group=_NEGOTIATIONS,
                    seq=number,
                    enqueue_ns=since + epoch_ns,
                    status="open" if end is None else "ok",
                )
            )
    transfers = [each.transfer for each in together if each.transfer is not None]
    if not transfers:
        return
    begin = min(start for start, _ in transfers)
    ends = [end for _, end in transfers if end is not None]
    end = max(ends) if len(ends) == len(together) else None
    for rank in sorted({*ready, *everywhere}):
        rows[rank].append(
            Row(
                start_ns=begin + epoch_ns,
                end_ns=None if end is None else end + epoch_ns,
                kind="message",
                name=name,
                lane=f"comm/{_GROUP}",
                op=op,
                group=_GROUP,
                seq=number,
                bytes=None if op in _RESHAPING else size,
                out_bytes=size,
                dtype=(carried[0].dtype or None) if len(dtypes) == 1 else None,
                enqueue_ns=min(ready.get(rank, begin), begin) + epoch_ns,
                status="open" if end is None else "ok",
                tensors=tuple(each.id for each in carried),
            )
        )


def _ready(together: list[_Operation]) -> dict[int, int]:
    """When each rank was ready with all tensors of a message, where that is known."""
    parts = [{0: _begin(operation), **operation.ready} for operation in together]
    ranks = set(parts[0]).intersection(*parts[1:])
    return {rank: max(part[rank] for part in parts) for rank in sorted(ranks)}


def _add_activities(
    operation: _Operation, tensor: TensorInfo, rows: list[Row], epoch_ns: int
) -> None:
    """Adds the activities of rank 0 for an operation."""
    for activity in operation.activities:
        rows.append(
            Row(
                start_ns=activity.start_ns + epoch_ns,
                end_ns=(activity.end_ns or activity.start_ns) + epoch_ns,
                kind="copy" if activity.name.startswith("MEMCPY") else "host",
                name=clean(activity.name),
                lane=f"tensor/{clean(tensor.name, 200)}",
                tensors=(tensor.id,),
            )
        )
