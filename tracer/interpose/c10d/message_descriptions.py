"""Describes messages: what they send, for which parameters, and as which message of their group."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.tracer.interpose.c10d.arguments import bytes_by_member, flatten, measure, name_of
from ddltrace.tracer.nccl.event_kinds import DIRECTORY_VARIABLE
from ddltrace.tracer.record.recorder import Message
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.c10d.c10d_operators import Operator
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.interpose.patch_context import PatchContext

_BETWEEN: Final = (__file__, str(Path(__file__).with_name("observer.py")))
"""Files of the functions between a kernel and the question who called it."""


class Sparse(NamedTuple):
    """What a sum of sparse tensors carries, read before its launch.

    From then on Gloo's thread may put the sum, with other memory and of another size, into the
    tensor at any time.

    Attributes:
        bytes: Its size.
        name: Its name.
        tensors: The parameters that it carries.
    """

    bytes: int | None
    name: str
    tensors: list[int] | None


class Descriptions:
    """Describes the messages of a rank.

    Args:
        context: The parts of the recording rank.
    """

    def __init__(self, context: PatchContext) -> None:
        self._recorder = context.recorder
        self._registry = context.registry
        self._native = context.native
        self._counters: set[int] = set()
        self._graphs = context.graphs
        self._ddp = context.ddp
        self._below = context.groups.below
        # NCCL's events are merged by the address of the buffer, too.
        self._keeps_buffers = DIRECTORY_VARIABLE in os.environ

    def describe(
        self,
        operator: Operator,
        args: Sequence[Any],
        group: Group,
        start: int,
        *,
        seam: str = "dispatcher",
        by_engine: bool = False,
        sparse: Sparse | None = None,
    ) -> Message:
        """Creates a message with all values that the call provides.

        Args:
            operator: The operation.
            args: Its arguments.
            start: When it was called.
            seam: Where it was seen, one of `SEAMS`.
            by_engine: See `is_reducers`.
            sparse: Of a sum of sparse tensors, what was read before its launch.
        """
        message = self._recorder.new_message(operator.op, group.name, start, seam)
        if self._below.outer is not None:
            self._below.messages += 1
        if sparse is None:
            self._describe(message, operator, args, group, by_engine=by_engine)
        else:
            message.dtype = name_of(flatten(args[0])[0].dtype)
            message.bytes, message.name, message.tensors = sparse
            message.out_bytes = None  # known only after the sum
        if operator.op == "all_to_all" and operator.inputs is not None and seam != "library":
            at = operator.splits
            splits = () if at is None or len(args) <= at else args[at]
            split_bytes = bytes_by_member(args[operator.inputs], splits)
            self._recorder.keep_splits(message.id, split_bytes)
        self._number(message, operator, args, group)
        return message

    def sparse(self, operator: Operator, args: Sequence[Any], group: Group) -> Sparse:
        """Returns what a sum of sparse tensors carries; to be called before its launch.

        Args:
            operator: The operation.
            args: Its arguments.
        """
        tensors, size, _ = measure(args[0])
        by_engine = self.is_reducers(operator, sys._getframe())
        return Sparse(size, *self.name(operator, group, tensors, by_engine=by_engine))

    def capture(self, operator: Operator, args: Sequence[Any], group: Group, start: int) -> None:
        """Records a message that has become part of a graph.

        Args:
            operator: The operation.
            args: Its arguments.
            start: When it was called.
        """
        if self._below.outer is not None:
            self._below.messages += 1
        by_engine = self.is_reducers(operator, sys._getframe())
        message = Message(-1, operator.op, group.name, start, "graph")
        self._describe(message, operator, args, group, by_engine=by_engine)
        self._set_peer(message, operator, args, group)
        self._graphs.add(message, group)

    def _describe(
        self,
        message: Message,
        operator: Operator,
        args: Sequence[Any],
        group: Group,
        *,
        by_engine: bool,
    ) -> None:
        """Sets sizes, element type, name and parameters of a message."""
        inputs, outputs = operator.inputs, operator.outputs
        tensors: list[torch.Tensor] = []
        sparse = False
        if inputs is not None:
            tensors, message.bytes, sparse = measure(args[inputs])
        if outputs == inputs:
            # A broadcast's receivers and a reduction's contributors hold the same tensor. The
            # result of sparse tensors is known only after the sum.
            message.out_bytes = None if sparse else message.bytes
        elif outputs is not None:
            received, message.out_bytes, _ = measure(args[outputs])
            tensors = tensors or received
        if tensors:
            message.dtype = name_of(tensors[0].dtype)
            if self._keeps_buffers and not tensors[0].is_sparse:
                message.buffer = tensors[0].data_ptr()
            named = self.name(operator, group, tensors, by_engine=by_engine)
            message.name, message.tensors = named
        elif inputs is None and outputs is None:
            message.bytes = message.out_bytes = 0

    def bucket_of(
        self, operator: Operator, args: Sequence[Any], group: Group, caller: FrameType | None
    ) -> tuple[str, list[int] | None] | None:
        """Returns the bucket of DDP's reducer that a Python group is about to send.

        Args:
            operator: The operation of the group.
            args: Arguments of the operation.

        Returns:
            Name and parameters of the bucket; None if the message is not a bucket.
        """
        if not self.is_reducers(operator, caller):
            return None
        return self._bucket(group.name, flatten(args[0]))

    def leave_out(self, operator: Operator, args: Sequence[Any], group: Group) -> None:
        """Counts a message that is not recorded, so that later numbers agree between ranks."""
        self._number(Message(-1, operator.op, group.name, 0, "dispatcher"), operator, args, group)

    def is_reducers(self, operator: Operator, caller: FrameType | None) -> bool:
        """Whether DDP's reducer may be the sender of a message."""
        return operator.op == "all_reduce" and self._ddp.in_use and _called_by_engine(caller)

    def _bucket(
        self, group: str, tensors: Sequence[torch.Tensor]
    ) -> tuple[str, list[int] | None] | None:
        """Returns name and parameters of a bucket of the reducer; None if it is not a bucket."""
        return self._ddp.bucket_of(group, tensors[0]) if len(tensors) == 1 else None

    @staticmethod
    def _set_peer(message: Message, operator: Operator, args: Sequence[Any], group: Group) -> None:
        """Sets the peer and the tag of a message."""
        if operator.peer is not None:
            peer = args[operator.peer] if len(args) > operator.peer else None
            message.peer = group.global_rank(peer)
        if operator.tag is not None:
            message.tag = args[operator.tag] if len(args) > operator.tag else 0

    def _number(
        self, message: Message, operator: Operator, args: Sequence[Any], group: Group
    ) -> None:
        """Sets the peer of the message, and its number, which is equal on all its ranks."""
        self._set_peer(message, operator, args, group)
        if operator.op not in P2P_OPS:
            if group.counter is None and self._native is not None:
                counter = self._native.gated()
                if counter >= 0:
                    if counter in self._counters:  # of a dead group that had the same address
                        self._native.collectives[counter] = 0
                    self._counters.add(counter)
                    group.count_in_cpp(self._native, counter)
            message.seq = group.next_collective()
            return
        # For a receive from any source: when the message has arrived.
        message.seq = group.next_between(message.op, message.peer, message.tag)

    def name(
        self,
        operator: Operator,
        group: Group,
        tensors: list[torch.Tensor],
        *,
        by_engine: bool = False,
        at: tuple[int, int] | None = None,
    ) -> tuple[str, list[int] | None]:
        """Returns the name of a message and the parameters that it carries.

        The address of a single tensor is looked up unless it is given, see `Registry.tensors_at`.
        """
        registry = self._registry
        carried = registry.carried.now
        if carried is not None:
            name, parameters = carried
            return name or operator.op, parameters
        bucket = self._bucket(group.name, tensors) if by_engine else None
        if bucket is not None:
            return bucket
        parameters = registry.tensors_at(tensors, at)
        return (operator.op if parameters is None else registry.name_of(parameters)), parameters


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether a message is sent by C++, below autograd's engine.

    DDP's reducer calls so: no Python frame lies between the kernel and the engine (or none at
    all, on an engine thread).

    Args:
        frame: The Python frame that sends the message, or a frame of the tracer.
    """
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
