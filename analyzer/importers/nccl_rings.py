"""Rings of NCCL's events (`analyzer/nccl/ring_file.py`) without a trace: their messages.

A collective, send or receive is handed over when its event ends. It ran from the first to the last
of its kernel channels or, without them, of its proxies' operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ddltrace.analyzer.events.event_columns import NULL_NS
from ddltrace.analyzer.importers.communication import count, public_op
from ddltrace.analyzer.importers.imported import ImportedTrace
from ddltrace.analyzer.importers.names import clean
from ddltrace.analyzer.importers.nccl_operations import (
    Operation,
    Process,
    ProcessFacts,
    bytes_of,
    trace_of,
)
from ddltrace.analyzer.nccl.messages import HANDED_OVER, RunTimes, run_times
from ddltrace.analyzer.nccl.ring_file import Ring, read_ring, recognizes
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.run_info import RunInfo

__all__ = ["NAME", "read", "recognizes"]

NAME: Final = "nccl-ring"


def read(paths: Sequence[Path]) -> ImportedTrace:
    """Reads the rings of a job.

    Raises:
        TraceError: None of them can be read, or they hold no message.
    """
    run = RunInfo(status="complete", level="comm", source=NAME)
    rings, errors = [], []
    for path in paths:
        try:
            rings.append(read_ring(path))
        except TraceError as error:
            errors.append(str(error))
    if not rings:
        raise TraceError(errors[0])
    run.notes += errors
    operations: list[Operation] = []
    facts: dict[Process, ProcessFacts] = {}
    handed_over = 0
    sizes = _sizes(rings)
    for ring in rings:
        run.notes += [f"{ring.path.name}: {note}" for note in ring.notes]
        times = run_times(ring.events)
        operations += _operations(ring, times, sizes)
        handed_over += int((times.source == HANDED_OVER).sum())
        facts[_process(ring)] = ProcessFacts(
            ring.rank,
            ring.boot_id or ring.host or str(ring.path),
            {
                "monotonic_ns": ring.opened_ns,
                "unix_ns": ring.opened_unix_ns,
                "samples": [],
            },
        )
    if not operations:
        raise TraceError(f"{paths[0]} holds no message of NCCL (table nccl_events may have others)")
    if handed_over:
        run.notes.append(
            f"{counted(handed_over, 'message')} {agreeing(handed_over, 'ends')} when NCCL has "
            "enqueued them: neither kernel channels nor proxy operations were recorded"
        )
    return trace_of(operations, run, facts)


def _process(ring: Ring) -> Process:
    return (ring.host, ring.pid, None)


def _sizes(rings: Sequence[Ring]) -> dict[str, int]:
    """Ranks of each communicator; version 3 of the interface tells only who is in it."""
    sizes: dict[str, int] = {}
    for ring in rings:
        for each in ring.communicators.values():
            least = each.size or (0 if each.rank is None else each.rank + 1)
            sizes[each.id] = max(least, sizes.get(each.id, 1))
    return sizes


def _operations(ring: Ring, times: RunTimes, sizes: dict[str, int]) -> Iterator[Operation]:
    table = ring.events.take(times.rows)
    names = ("func", "comm", "comm_name", "comm_rank", "seq", "peer", "bytes", "start_ns")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    begins, ends = times.begin.tolist(), times.end.tolist()
    for (func, comm, label, rank, seq, peer, size, enqueued), begin, end in zip(
        rows, begins, ends, strict=True
    ):
        op = public_op(func or "") or clean(func or "unknown", 60)
        place = rank if rank is not None else ring.rank or 0
        members = max(sizes.get(comm or "", 1), place + 1)
        given, taken = bytes_of(op, count(size), members)
        yield Operation(
            process=_process(ring),
            place=place,
            size=members,
            communicator=comm or "unknown",
            label=label or "",
            op=op,
            seq=seq,
            peer=peer,
            bytes=given,
            out_bytes=taken,
            start_ns=begin,
            end_ns=None if end == NULL_NS else end,
            enqueue_ns=enqueued,
            guessed=False,
        )
