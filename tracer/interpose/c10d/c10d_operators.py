"""The operators of PyTorch's ``c10d`` library, and the positions of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ddltrace.tracer.trace.schema import P2P_OPS


@dataclass(frozen=True)
class Operator:
    """Positions of the recorded values among the arguments of a ``c10d`` operator.

    Attributes:
        op: Public name of the operation.
        inputs: Argument with this rank's input: a tensor, a list or a list of lists.
        outputs: Argument with this rank's output.
        group: Argument with the process group.
        peer: Argument with the group rank of the root or the peer.
        tag: Argument with the tag.
        asynchronous: Argument that is false if the caller waits immediately.
        splits: Argument with the rows of the input for each rank.
        blocks: Whether the operator itself returns only when the message is complete.
        composed: Whether Gloo implements it with several other collectives, which end earlier.
        waited_once: Whether on Gloo only the holder of the handle may wait for it.
    """

    op: str
    inputs: int | None
    outputs: int | None
    group: int
    peer: int | None = None
    tag: int | None = None
    asynchronous: int | None = None
    splits: int | None = None
    blocks: bool = False
    composed: bool = False

    @property
    def waited_once(self) -> bool:
        """See above: a wait executes a send, and writes the output of a composed operation."""
        return self.composed or self.op in P2P_OPS

    def is_asynchronous(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> bool:
        """Whether the caller of the operator does not wait immediately."""
        if self.asynchronous is None or len(args) <= self.asynchronous:
            return bool(kwargs.get("async_op", True))
        return bool(args[self.asynchronous])


OPERATORS: Final = {
    "allreduce_": Operator("all_reduce", 0, 0, 1, asynchronous=4),
    "allreduce_coalesced_": Operator("all_reduce", 0, 0, 1, asynchronous=3),
    "broadcast_": Operator("broadcast", 0, 0, 1, peer=2, asynchronous=4),
    "reduce_": Operator("reduce", 0, 0, 1, peer=3, asynchronous=5),
    "allgather_": Operator("all_gather", 1, 0, 2, asynchronous=3),
    "_allgather_base_": Operator("all_gather", 1, 0, 2, asynchronous=3),
    "allgather_coalesced_": Operator("all_gather", 1, 0, 2, asynchronous=3),
    "allgather_into_tensor_coalesced_": Operator(
        "all_gather", 1, 0, 2, asynchronous=3, composed=True
    ),
    "reduce_scatter_": Operator("reduce_scatter", 1, 0, 2, asynchronous=4, composed=True),
    "_reduce_scatter_base_": Operator("reduce_scatter", 1, 0, 2, asynchronous=4, composed=True),
    "reduce_scatter_tensor_coalesced_": Operator(
        "reduce_scatter", 1, 0, 2, asynchronous=4, composed=True
    ),
    "gather_": Operator("gather", 1, 0, 2, peer=3, asynchronous=4),
    "scatter_": Operator("scatter", 1, 0, 2, peer=3, asynchronous=4),
    "alltoall_": Operator("all_to_all", 1, 0, 2, asynchronous=3),
    "alltoall_base_": Operator("all_to_all", 1, 0, 2, asynchronous=5, splits=4),
    "barrier": Operator("barrier", None, None, 1, asynchronous=3),
    "monitored_barrier_": Operator("barrier", None, None, 1, blocks=True),
    "send": Operator("send", 0, None, 1, peer=2, tag=3),
    "recv_": Operator("recv", None, 0, 1, peer=2, tag=3),
    "recv_any_source_": Operator("recv", None, 0, 1, tag=2),
}
"""Operators by name, without the prefix of the library."""
