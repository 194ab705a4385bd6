"""Describes the messages of a Kineto file: operation, group, bytes, peer.

Newer files contain these values in the kernel's arguments. In older ones the kernel is joined,
through the call that launched it, with the ``nccl:`` or ``record_param_comms`` span around that
call. Without a GPU the ``gloo:`` spans are the messages, and the ``c10d::`` operators issued them.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.importers.chrome.trace_events import NO_ARGS, Args
from ddltrace.analyzer.importers.communication import (
    MAX_INT32,
    count,
    element_type,
    elements_of,
    is_known,
    members,
    public_op,
    size_of,
)
from ddltrace.analyzer.importers.kineto.decoded_events import Intervals
from ddltrace.analyzer.importers.kineto.phases import Spans
from ddltrace.analyzer.importers.names import clean
from ddltrace.tracer.trace.communication_kernels import library_of, qualified_name
from ddltrace.tracer.trace.run_info import GroupInfo
from ddltrace.tracer.trace.schema import P2P_OPS

DEFAULT_GROUP: Final = "default"
ALL_RANKS: Final = "assumed: all ranks"
MEMBERS_UNKNOWN: Final = "its members are unknown"

_EXECUTED: Final = re.compile(r"(?:gloo|mpi|ucc|nccl|xccl|hccl|rccl):").match
_ON_HOST: Final = re.compile(r"(gloo|mpi|ucc):").match
"""Libraries whose spans last as long as the message, also in a job with device work."""

_ISSUED: Final = re.compile(r"c10d::").match
_LIBRARY_SPAN: Final = re.compile(r"(?:nccl|xccl|hccl|rccl):").match
_PARAMETER_SPAN: Final = re.compile(r"record_param_comms$").match
_PAIR: Final = re.compile(r"(?:send|recv)\s*\d+\s*(?:->|<-)\s*(\d+)")
# Place of the peer or root among the inputs of a c10d operator, and of the tag.
_PEER_INPUT: Final = {"c10d::send": 2, "c10d::recv_": 2, "c10d::broadcast_": 2}
_TAG_INPUT: Final = {"c10d::send": 3, "c10d::recv_": 3}
_SPLITS_INPUT: Final = {"c10d::alltoall_base_": 4}
_OUTPUT_FIRST: Final = frozenset(
    ("c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
)
"""Operators whose first input is the tensor that they write."""
_MAX_NAME: Final = 60
_COLLECTIVES: Final = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
)
"""A name with ``reduce`` or ``send`` in it may also be of a part of a collective."""


@dataclass
class Message:
    """One message of a rank; None for values that the file does not contain.

    `caused_by` is the row of the call that issued it.
    """

    op: str
    group: str
    seq: int | None = None
    peer: int | None = None
    tag: int | None = None
    bytes: int | None = None
    out_bytes: int | None = None
    dtype: str | None = None
    caused_by: int | None = None
    split_bytes: list[int] | None = None


class Describer:
    """Describes the messages of one file, and collects the groups that they name."""

    def __init__(
        self, intervals: Intervals, groups: dict[str, GroupInfo], backend: str, rank: int | None
    ) -> None:
        self.groups = groups
        self._configured = list(groups.values())
        self._intervals = intervals
        self._backend = backend
        self._rank = rank

    def kernels(self, rows: list[int], launched: list[int]) -> list[Message]:
        """Describes kernels.

        Args:
            launched: For each the row of the call that launched it, or -1.
        """
        calls = np.array(launched, dtype=np.int64)
        outer = self._around(calls, _PARAMETER_SPAN)
        inner = self._around(calls, _LIBRARY_SPAN)
        messages = []
        for row, call, wide, narrow in zip(rows, launched, outer, inner, strict=True):
            sources = [self._source(row), self._source(wide), self._source(narrow)]
            message = self._describe(sources)
            if call >= 0:
                message.caused_by = call
            messages.append(message)
        return messages

    def host_spans(self) -> tuple[list[int], list[Message]]:
        """Finds and describes the messages between hosts of a file with device work."""
        intervals = self._intervals
        rows = _by_start(intervals, intervals.named(_ON_HOST))
        return rows, [self._describe([self._source(row)], self._library(row)) for row in rows]

    def _library(self, row: int) -> str:
        found = _ON_HOST(self._name(row))
        return "" if found is None else found[1]

    def spans(self) -> tuple[list[int], list[Message]]:
        """Finds and describes the messages of a file without device work."""
        intervals = self._intervals
        executed = intervals.named(_EXECUTED)
        if not executed.any():
            executed = intervals.named(_PARAMETER_SPAN)
        rows = _by_start(intervals, executed)
        waiting: dict[str | None, deque[int]] = defaultdict(deque)
        for row in _by_start(intervals, intervals.named(_ISSUED)):
            waiting[public_op(self._name(row))].append(row)
        messages = []
        for row in rows:
            queue = waiting[public_op(self._name(row))]
            issuer = self._issuer(queue, row)
            message = self._describe([self._source(row)])
            if issuer >= 0:
                message.caused_by = issuer
                self._add_inputs(message, issuer)
            messages.append(message)
        return rows, messages

    def _issuer(self, queue: deque[int], row: int) -> int:
        """The operator that issued a span: the oldest waiting one of its kind and size.

        One that is older and of another size was issued before the recording of spans began.
        """
        intervals = self._intervals
        wanted = self._elements(row)
        while queue and intervals.start[queue[0]] <= intervals.start[row]:
            candidate = queue.popleft()
            found = self._elements(candidate)
            if wanted is None or found is None or wanted == found:
                return candidate
        return -1

    def _around(self, calls: np.ndarray[Any, Any], is_wanted: Callable[[str], object]) -> list[int]:
        """For each call the row of the matching span around it in its thread, or -1."""
        intervals = self._intervals
        rows = np.flatnonzero(intervals.named(is_wanted))
        spans = Spans.of(intervals.start[rows], intervals.end[rows], rows, intervals.thread[rows])
        found = spans.at_in_thread(intervals.start[calls], intervals.thread[calls])
        return [int(row) for row in np.where(calls >= 0, found, -1)]

    def _describe(self, sources: list[tuple[str, Args]], library: str = "") -> Message:
        arguments = [args for _, args in sources]
        dtype, width = element_type(_first(arguments, "dtype"))
        sent = size_of(_first(arguments, "in_elements"), width)
        received = size_of(_first(arguments, "out_elements"), width)
        if sent is None:
            dtype_of_input, sent = _input(arguments)
            dtype = dtype or dtype_of_input
        op = self._op(sources)
        group = self._group(arguments, library)
        pair = next((found for name, _ in sources if (found := _PAIR.search(name))), None)
        peer = None
        if op in P2P_OPS:
            key = "destination" if op == "send" else "source"
            peer = count(_first(arguments, key))
            if peer is None and pair is not None:
                peer = self._global_rank(group, int(pair.group(1)))
        if op == "recv":
            sent, received = None, received if received else sent
        elif op == "send":
            received = None
        return Message(
            op=op,
            group=group,
            seq=count(_first(arguments, "seq")),
            peer=peer,
            bytes=sent,
            out_bytes=received,
            dtype=None if dtype is None else clean(dtype, 40),
            split_bytes=_split_bytes(op, sent, _first(arguments, "in_splits")),
        )

    def _op(self, sources: list[tuple[str, Args]]) -> str:
        for _, args in sources:
            if isinstance(args.collective, str) and (op := public_op(args.collective)):
                return op
        # The library's span distinguishes an all-to-all from a send; the kernel does not.
        for name, _ in reversed(sources[1:]):
            if (op := public_op(name)) and is_known(op):
                return op
        own = sources[0][0]
        return (public_op(own) if _EXECUTED(own) else None) or kernel_op(own)

    def _group(self, arguments: list[Args], library: str) -> str:
        name = _first(arguments, "group_name")
        ranks = members(_first(arguments, "group_ranks"))
        if not isinstance(name, str) or not name:
            size = count(_first(arguments, "group_size"))
            if library and not ranks and size is None:
                # A span of another library than the device's is of a group of its own.
                group = GroupInfo(library, ALL_RANKS, library, ())
            else:
                group = self._unnamed(ranks, size)
            return self.groups.setdefault(group.name, group).name
        name = clean(name, 200)
        if name not in self.groups and len(self.groups) < 1 << 14:
            self.groups[name] = GroupInfo(
                name=name,
                description=clean(_first(arguments, "group_description") or "", 200),
                backend=self._backend,
                ranks=ranks,
            )
        return name

    def _unnamed(self, ranks: tuple[int, ...], size: int | None) -> GroupInfo:
        """The group of a message without the name of one: by its members, else by its size."""
        if ranks:
            fits = [group for group in self._configured if group.ranks == ranks]
            shown = clean(f"ranks {', '.join(map(str, ranks))}", 200)
            return fits[0] if fits else GroupInfo(shown, "", self._backend, ranks)
        if size is None:
            if len(self._configured) == 1:
                return self._configured[0]
            # Its members are filled in when the number of ranks is known.
            return GroupInfo(DEFAULT_GROUP, ALL_RANKS, self._backend, ())
        fits = [group for group in self._configured if self._may_be(group, size)]
        if len({group.ranks for group in fits}) == 1:
            return fits[0]
        return GroupInfo(f"unnamed of {size}", MEMBERS_UNKNOWN, self._backend, (), size=size)

    def _may_be(self, group: GroupInfo, size: int) -> bool:
        """Whether a configured group has that size, and this rank as a member."""
        if not group.ranks:
            return group.size in (size, None)
        return len(group.ranks) == size and (self._rank is None or self._rank in group.ranks)

    def _global_rank(self, group: str, rank: int) -> int:
        """Converts a rank of a group to a rank of the job; unchanged if the members are unknown."""
        known = self.groups.get(group)
        return known.ranks[rank] if known is not None and rank < len(known.ranks) else rank

    def _add_inputs(self, message: Message, issuer: int) -> None:
        """Reads what only the operator's inputs tell, if the profiler recorded them."""
        name = self._name(issuer)
        inputs = self._intervals.args[issuer].inputs
        place = _PEER_INPUT.get(name)
        if (
            place is not None
            and message.peer is None
            and (number := _at(inputs, place)) is not None
        ):
            message.peer = self._global_rank(message.group, number)
        if name in _TAG_INPUT:
            message.tag = _at(inputs, _TAG_INPUT[name])
        if name in _SPLITS_INPUT and isinstance(inputs, list):
            splits = next(iter(inputs[_SPLITS_INPUT[name] :]), None)
            message.split_bytes = _split_bytes(message.op, message.bytes, splits)
        if name in _OUTPUT_FIRST and message.out_bytes is None:
            _, message.out_bytes = _input([self._intervals.args[issuer]])

    def _elements(self, row: int) -> int | None:
        dims = self._intervals.args[row].dims
        if self._name(row) in _OUTPUT_FIRST and isinstance(dims, list):
            dims = dims[1:]
        return _total(dims)

    def _source(self, row: int) -> tuple[str, Args]:
        if row < 0:
            return "", NO_ARGS
        return self._name(row), self._intervals.args.get(row, NO_ARGS)

    def _name(self, row: int) -> str:
        return self._intervals.names[int(self._intervals.name[row])]


def kernel_op(name: str) -> str:
    """The operation of a communication kernel, else the kernel's own name, cut short."""
    own = qualified_name(name).rpartition("::")[2][:_MAX_NAME]
    library = library_of(name)
    if library is not None and library.op is not None:
        return library.op
    op = public_op(own)
    stated = op in _COLLECTIVES or (library is not None and library.speaks)
    return op if op is not None and stated else own


def _by_start(intervals: Intervals, mask: np.ndarray[Any, Any]) -> list[int]:
    rows = np.flatnonzero(mask)
    order: list[int] = rows[np.argsort(intervals.start[rows], kind="stable")].tolist()
    return order


def _first(arguments: list[Args], key: str) -> Any:
    values = (getattr(args, key) for args in arguments)
    return next((value for value in values if value is not None and value != ""), None)


def _input(arguments: list[Args]) -> tuple[str | None, int | None]:
    """Element type and bytes of the first input whose shape was recorded."""
    for args in arguments:
        dims, types = args.dims, args.types
        if not isinstance(types, list) or not types or not isinstance(types[0], str):
            continue
        dtype, width = element_type(types[0])
        elements = _total(dims)
        if width is not None:
            return dtype, size_of(elements, width)
    return None, None


def _split_bytes(op: str, sent: int | None, splits: Any) -> list[int] | None:
    """What an all-to-all sends to each rank of its group, bytes; None if it is not known.

    Args:
        op: The operation.
        sent: Bytes to all ranks together.
        splits: Rows or elements to each rank, as the profiler writes them. It shortens long lists.
    """
    sizes = members(splits)
    if op != "all_to_all" or sent is None or not sizes:
        return None
    row_bytes, rest = divmod(sent, max(sum(sizes), 1))
    return None if rest else [row_bytes * size for size in sizes]


def _total(dims: Any) -> int | None:
    """Elements of the first input with a shape."""
    if not isinstance(dims, list):
        return None
    return next((elements_of(shape) for shape in dims if isinstance(shape, list) and shape), None)


def _at(inputs: Any, place: int) -> int | None:
    if not isinstance(inputs, list) or place >= len(inputs):
        return None
    return count(inputs[place], MAX_INT32)
