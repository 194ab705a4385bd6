"""Operations of NCCL, as several formats have them, become the messages of a trace.

An operation names its communicator and its place in it: a process that is in several communicators
has a different place in each. The rank of a process in the job is its place in the communicator
that all processes are in, unless the format knows it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.importers.communication import count
from ddltrace.analyzer.importers.imported import ImportedTrace, Row, table_of
from ddltrace.analyzer.importers.sequence import number_messages
from ddltrace.tracer.number_text import agreeing
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo
from ddltrace.tracer.trace.schema import P2P_OPS
from ddltrace.tracer.trace.trace_files import segment_name

Process = tuple[str, int | None, int | None]
"""Host, process id, and, of a process with several devices, the rank in its communicators."""


@dataclass
class Operation:
    """One operation on one rank; `place` and `peer` are ranks in the communicator."""

    process: Process
    place: int
    size: int
    communicator: str
    label: str
    op: str
    seq: int | None
    peer: int | None
    bytes: int | None
    out_bytes: int | None
    start_ns: int
    end_ns: int | None
    enqueue_ns: int | None
    guessed: bool


@dataclass(frozen=True)
class ProcessFacts:
    """What a format knows of a process beside its operations.

    Attributes:
        rank: Its rank in the job; None if unknown.
        clock_domain: As in `RankInfo`.
        clock: As in `RankInfo`.
    """

    rank: int | None
    clock_domain: str
    clock: dict[str, object]


def trace_of(
    operations: Sequence[Operation],
    run: RunInfo,
    processes: Mapping[Process, ProcessFacts] | None = None,
) -> ImportedTrace:
    """The trace that consists of some operations.

    Args:
        operations: The operations of all processes.
        run: Its record; receives the ranks, and notes on what is missing.
        processes: What is known of the processes; nothing by default, or of those with several
            ranks.
    """
    _split_processes(operations)
    by_process: dict[Process, list[Operation]] = defaultdict(list)
    for each in operations:
        by_process[each.process].append(each)
    facts = {each: (processes or {}).get(each) for each in by_process}
    ranks, world = _ranks_of(by_process, facts, run.notes)
    if len(ranks) < world:
        run.notes.append(
            f"{world - len(ranks)} of {world} ranks {agreeing(world - len(ranks), 'has')} no record"
        )
    if run.notes:
        run.status = "partial"
    groups = _Groups(by_process, ranks)
    tables = {}
    for process in sorted(by_process, key=ranks.__getitem__):
        mine, rank = by_process[process], ranks[process]
        rows = [groups.row(each) for each in mine]
        first = min(row.start_ns for row in rows)
        host, pid, _ = process
        guessed = any(each.guessed for each in mine)
        known = facts[process]
        wall_clock = {"monotonic_ns": first, "unix_ns": first, "samples": []}
        # The time of writing does not determine when other ranks' operations ran.
        domain = f"host of rank {rank}" if guessed or not host else host
        info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=0, pid=pid or 0),
            world_size=world,
            pid=pid,
            host=host,
            clock_domain=known.clock_domain if known else domain,
            clock=dict(known.clock) if known else {} if guessed else wall_clock,
            status="complete",
            level="comm",
            backend="nccl",
            device="cuda",
            groups=groups.infos(mine),
            events=len(rows),
        )
        run.ranks.append(info)
        tables[info.segment] = table_of(rows)
    return number_messages(run, tables)


_GIVES_TO_ALL: Final = ("reduce_scatter", "scatter", "all_to_all")
_TAKES_FROM_ALL: Final = ("all_gather", "gather", "all_to_all")


def bytes_of(op: str, size: int | None, ranks: int) -> tuple[int | None, int | None]:
    """Bytes of one rank's input and output, of a rooted operation those of the root.

    The Inspector's size is NCCL's element count times the element's size. NCCL counts what one
    rank gives another: in an all_gather and gather the input of one rank, in a reduce_scatter and
    scatter the output of one rank, in an all_to_all the part for one rank (``nccl.h``;
    ``inspectorComputeCollBw`` multiplies accordingly).
    """
    if size is None:
        return None, None
    whole = count(size * max(ranks, 1))
    return (
        None if op == "recv" else whole if op in _GIVES_TO_ALL else size,
        None if op == "send" else whole if op in _TAKES_FROM_ALL else size,
    )


def _split_processes(operations: Sequence[Operation]) -> None:
    """Separates the ranks of a process that has several places in one communicator."""
    places: dict[tuple[Process, str], set[int]] = defaultdict(set)
    for each in operations:
        places[each.process, each.communicator].add(each.place)
    shared = {process for (process, _), known in places.items() if len(known) > 1}
    for each in operations:
        if each.process in shared:
            each.process = (*each.process[:2], each.place)


def _ranks_of(
    by_process: dict[Process, list[Operation]],
    facts: Mapping[Process, ProcessFacts | None],
    notes: list[str],
) -> tuple[dict[Process, int], int]:
    """The rank of each process in the job, and how many ranks there are."""
    places: dict[str, dict[Process, int]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for process, mine in by_process.items():
        for each in mine:
            places[each.communicator][process] = each.place
            sizes[each.communicator] = max(each.size, sizes.get(each.communicator, 0))
    known = {each: fact.rank for each, fact in facts.items() if fact and fact.rank is not None}
    if len(known) == len(by_process) == len(set(known.values())):
        return known, max(*sizes.values(), max(known.values()) + 1)
    largest = max(sizes, key=lambda name: (len(places[name]), sizes[name]))
    ranks = places[largest]
    if len(ranks) == len(by_process) == len(set(ranks.values())):
        return ranks, sizes[largest]
    notes.append(
        "no communicator has a record of every process: "
        "ranks are numbered by host and process, not as the job numbers them"
    )
    order = sorted(by_process, key=lambda process: tuple(str(part).zfill(12) for part in process))
    return {process: rank for rank, process in enumerate(order)}, len(order)


class _Groups:
    """The communicators in the job's ranks."""

    def __init__(
        self, by_process: dict[Process, list[Operation]], ranks: dict[Process, int]
    ) -> None:
        self._members: dict[str, dict[int, int]] = defaultdict(dict)
        self._sizes: dict[str, int] = {}
        ops: dict[str, Counter[str]] = defaultdict(Counter)
        for process, mine in by_process.items():
            for each in mine:
                self._members[each.communicator][each.place] = ranks[process]
                self._sizes[each.communicator] = each.size
                if each.op not in P2P_OPS:
                    ops[each.communicator][each.op] += 1
        # NCCL counts per communicator and function: the same number can come up for two.
        self._mixed = {name for name, counts in ops.items() if len(counts) > 1}

    def row(self, each: Operation) -> Row:
        """The event of an operation."""
        peer = None
        if each.op in P2P_OPS and each.peer is not None:
            peer = self._members[each.communicator].get(each.peer)
        return Row(
            start_ns=each.start_ns,
            end_ns=each.end_ns,
            kind="message",
            name=each.op,
            lane=f"comm/{each.communicator}",
            op=each.op,
            group=self._name(each),
            seq=each.seq,
            peer=peer,
            bytes=each.bytes,
            out_bytes=each.out_bytes,
            enqueue_ns=each.enqueue_ns,
            status=None if each.end_ns is None else "ok",
        )

    def infos(self, mine: Iterable[Operation]) -> list[GroupInfo]:
        """The groups of a rank; their members are known if all of them left records."""
        infos = {}
        for each in mine:
            members = self._members[each.communicator]
            whole = len(members) == self._sizes[each.communicator]
            # In the communicator's order, which need not be that of the job's ranks.
            ranks = tuple(members[place] for place in sorted(members)) if whole else ()
            name = self._name(each)
            infos[name] = GroupInfo(name, each.label or each.communicator, "nccl", ranks)
        return list(infos.values())

    def _name(self, each: Operation) -> str:
        if each.communicator in self._mixed and each.op not in P2P_OPS:
            return f"{each.communicator}/{each.op}"
        return each.communicator
