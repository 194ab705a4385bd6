"""Process groups, and the sequence numbers of their messages, which are equal on all ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.connections.job_store import meeting_address
from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.trace.run_info import GroupInfo

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.native.library import NativeLibrary

# Gloo and MPI block in `wait` until completion; on other backends it may only order streams.
_BLOCKING_BACKENDS: Final = frozenset({"gloo", "mpi"})
# The fake backend for tests: its messages never report completion.
_SENDS_NOTHING: Final = "fake"
# Maximum number of counters for messages between two ranks.
_MAX_TAGS: Final = 4096
# Key of the first number for new tags after counters were dropped; no tag is negative.
_ANY_OTHER: Final = -1

_OWN: Final = "ddltrace:"
"""Prefix of the descriptions of groups that ddltrace's experiments create."""


@dataclass
class Group:
    """The state of a process group that is kept between messages.

    Attributes:
        name: Its name in the trace.
        ranks: Global ranks of its members; empty if the job created the group without registering
            it.
        own: Index of this rank in `ranks`, or None.
        blocking: Whether the end of ``Work.wait`` is the completion, by type of device.
        sends_nothing: Whether its messages are complete at once.
        collectives: Number of collectives so far, unless another counter is in use.
        next_elsewhere: Counter that replaces `collectives`; None if there is none.
        counter: Place of a counter in C++ that replaces `collectives`; None if there is none.
        messages: Number of sends and receives so far, by source and destination, then by tag.
    """

    name: str
    ranks: tuple[int, ...]
    own: int | None
    blocking: dict[str, bool] = field(default_factory=dict)
    sends_nothing: bool = False
    collectives: int = 0
    next_elsewhere: Callable[[], int | None] | None = None
    counter: int | None = None
    messages: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)

    def global_rank(self, rank: int | None) -> int | None:
        """Returns the global rank of a member, if it is known."""
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None

    def count_in_cpp(self, library: NativeLibrary, counter: int) -> None:
        """Counts the collectives in C++ from now on, which also counts those of which Python knows
        nothing.

        Args:
            counter: Place of the counter.
        """
        library.collectives[counter] += self.collectives
        self.next_elsewhere = functools.partial(library.next_collective, counter)
        self.counter = counter

    def next_collective(self) -> int | None:
        """Returns the number of the next collective; None if its group is not known."""
        if self.next_elsewhere is not None:
            return self.next_elsewhere()
        number = self.collectives
        self.collectives += 1
        return number

    def next_between(self, op: str, peer: int | None, tag: int | None) -> int | None:
        """Returns the number of the next message with the same source, destination and tag.

        Args:
            op: Whether it is a send or a receive.
            peer: Global rank of the other side, if it is known.
        """
        if self.own is None or peer is None:
            return None
        own = self.ranks[self.own]
        ends = (own, peer) if op == "send" else (peer, own)
        by_tag = self.messages.setdefault(ends, {})
        tag = tag or 0
        number = by_tag.get(tag)
        if number is None:
            if len(by_tag) > _MAX_TAGS:
                # The job uses a new tag for each message. Both sides reach this limit at the same
                # message and continue above all numbers used so far, so that no number is reused.
                highest = max(by_tag.values())
                by_tag.clear()
                by_tag[_ANY_OTHER] = highest
            number = by_tag.get(_ANY_OTHER, 0)
        by_tag[tag] = number + 1
        return number


class _Below(threading.local):
    """The state of a thread inside of a method of a process group that is written in Python.

    Attributes:
        outer: The group of the running method; None if none runs.
        messages: Number of messages recorded inside the method so far.
    """

    outer: Group | None = None
    messages = 0


class Groups:
    """The process groups observed so far, by name.

    Args:
        on_new: Called with a group when its first message is recorded, and when its description
            changes after that.

    Attributes:
        below: State of the current thread inside a group written in Python.
        seen: The group of a ``torch.distributed.ProcessGroup``, if it has been asked for before.
    """

    def __init__(self, on_new: Callable[[GroupInfo], None]) -> None:
        self._on_new = on_new
        self.below = _Below()
        self._group_of: WeakIdentityMap[Any, Group] = WeakIdentityMap()
        self._described: WeakIdentityMap[Any, str] = WeakIdentityMap()
        self.seen = self._group_of.get
        self._newest: dict[str, Group] = {}  # by what PyTorch calls it
        self._names: dict[str, int] = {}
        self._by_name: dict[str, Group] = {}

    def of(self, process_group: Any) -> Group:
        """Returns the group of a ``torch.distributed.ProcessGroup``."""
        group = self.seen(process_group)
        if group is None:
            group = self._add(process_group)
            self._group_of.set(process_group, group)
        return group

    def describe(self, process_group: Any, text: str) -> None:
        """Adds a text to the description of a group, unless it is part of it.

        Args:
            process_group: The ``torch.distributed.ProcessGroup``.
            text: What else the group is used for.
        """
        known = self._described.get(process_group) or process_group.group_desc
        if text in known.split(", "):
            return
        self._described.set(process_group, f"{known}, {text}")
        group = self.seen(process_group)
        if group is not None:
            self._on_new(self._info(process_group, group))

    def named(self, name: str) -> Group:
        """Returns the group with this name in the trace."""
        return self._by_name[name]

    @staticmethod
    def wait_blocks(process_group: Any, group: Group, tensor: torch.Tensor) -> bool:
        """Whether ``Work.wait`` returns only when a message of such a tensor is complete."""
        device_type = "cpu" if tensor.is_cpu else tensor.device.type
        known = group.blocking.get(device_type)
        if known is None:
            try:
                backend = process_group._get_backend(tensor.device).name()
            except RuntimeError:  # a custom backend of the job
                backend = process_group.name()
            known = group.blocking[device_type] = backend.lower() in _BLOCKING_BACKENDS
            if not known:
                _keep_durations(process_group)
            group.sends_nothing = backend.lower() == _SENDS_NOTHING
        return known

    def _add(self, process_group: Any) -> Group:
        import torch.distributed as dist

        try:
            name = _own_name(process_group) or process_group.group_name
        except RuntimeError:  # one in Python may have none itself
            name = _registered_name(process_group)
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group))
        except (KeyError, ValueError, RuntimeError):
            ranks = self._ranks_of_outer(process_group)
        former = self._newest.get(name)
        if former is not None and not ranks and not former.ranks:
            return former  # without the registry, two groups cannot be distinguished
        # A job that destroys its groups and creates them again reuses the names.
        number = self._names[name] = self._names.get(name, 0) + 1
        shown = name if number == 1 else f"{name}#{number}"
        own = process_group.rank() if ranks else None
        group = self._newest[name] = self._by_name[shown] = Group(shown, ranks, own)
        self._on_new(self._info(process_group, group))
        return group

    def _info(self, process_group: Any, group: Group) -> GroupInfo:
        import torch.distributed as dist

        description = self._described.get(process_group) or process_group.group_desc
        info = GroupInfo(group.name, description, process_group.name(), group.ranks)
        store = meeting_address(process_group)
        if store in {None, meeting_address(dist.group.WORLD)}:
            return info
        # It can have members of other jobs, to whom the ranks of this one mean nothing.
        own, size = process_group.rank(), process_group.size()
        return replace(info, size=size, store=store, place=own)

    def _ranks_of_outer(self, process_group: Any) -> tuple[int, ...]:
        """The ranks of an unregistered group: those of the outer group that it works for."""
        outer = self.below.outer
        if outer is None or process_group.size() != len(outer.ranks):
            return ()
        return outer.ranks if process_group.rank() == outer.own else ()


def _keep_durations(process_group: Any) -> None:
    """Has a group keep how long the device takes for each message."""
    with contextlib.suppress(Exception):  # of backends that cannot, and of older PyTorch
        process_group._enable_collectives_timing()


def _own_name(process_group: Any) -> str | None:
    """Returns the name of a group that ddltrace's experiments created; None for other groups."""
    description: str = process_group.group_desc
    return description.removeprefix(_OWN) if description.startswith(_OWN) else None


def _registered_name(process_group: Any) -> str:
    """Returns the name under which PyTorch registered a group, or else the name of its class."""
    from torch.distributed import distributed_c10d

    registered: str | None = distributed_c10d._world.pg_names.get(process_group)
    return type(process_group).__name__ if registered is None else registered
