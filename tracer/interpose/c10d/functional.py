"""Records waits for functional collectives, which return a tensor instead of a handle.

The first use of that tensor waits for the message. The message itself is recorded at the ``c10d``
operators below ``torch.distributed._functional_collectives``.

Calls by Python on the CPU bypass all kernels in Python, see `python_launches.py`: here the function
behind ``torch.ops`` offers the launch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.interpose.c10d.arguments import bytes_by_member
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS
from ddltrace.tracer.interpose.c10d.python_kernels import PythonKernels
from ddltrace.tracer.record.recorder import Launched, Message

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.c10d.c10d_operators import Operator
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.interpose.c10d.observer import Observer
    from ddltrace.tracer.interpose.c10d.python_launches import Offering
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns
_WAIT: Final = "wait_tensor"
_LAUNCHING: Final = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "isend",
    "irecv",
    "batch_p2p_ops",
)
# Functional collectives that are one message: the operator below, and the position of its root in
# the arguments after the tensor. The group is the last of these.
_PLAIN: Final = {
    "all_reduce": ("allreduce_", None),
    "all_reduce_": ("allreduce_", None),
    "all_gather_into_tensor": ("allgather_into_tensor_coalesced_", None),
    "reduce_scatter_tensor": ("reduce_scatter_tensor_coalesced_", None),
    "all_to_all_single": ("alltoall_base_", None),
    "broadcast": ("broadcast_", 0),
    "broadcast_": ("broadcast_", 0),
}
# Bounds the memory of the tracer if a job never uses its results.
_MAX_PENDING: Final = 4096


def install(context: PatchContext, observer: Observer, offering: Offering | None) -> None:
    """Registers kernels at the operators of functional collectives.

    Args:
        context: The parts of the recording rank.
        observer: Records the messages below.
        offering: Offers launches; None if it cannot.
    """
    import torch

    pending = _Pending(context, observer)
    kernels = PythonKernels(context, "_c10d_functional")
    for name in (*_LAUNCHING, _WAIT):
        if hasattr(torch.ops._c10d_functional, name):
            make = pending.waiting if name == _WAIT else pending.launching
            kernels.add(name, make(name))
    if offering is None:
        return
    for name, (below, root) in _PLAIN.items():
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is not None:
            launches = _ByOperator(offering, pending, OPERATORS[below], root)
            for called in (packet, packet.default):
                context.patches.put(called, "_op", offering.around(called._op, launches))
    wait = torch.ops._c10d_functional.wait_tensor
    for called in (wait, wait.default):
        context.patches.put(called, "_op", pending.around_wait(called._op, offering))


class _ByOperator:
    """The launches by one operator; see `python_launches.Launches`.

    Args:
        offering: Offers them.
        pending: Stores the messages whose results have not been waited for yet.
        operator: The operator below.
        root: Position of the root among the arguments.
    """

    def __init__(
        self, offering: Offering, pending: _Pending, operator: Operator, root: int | None
    ) -> None:
        from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

        self.operator = operator
        self.last_type: type = str
        self.num_args = 1 if root is None else 2
        self._record = offering.record
        self._pending = pending
        self._root = root
        self._resolve, self._class = _resolve_process_group, ProcessGroup

    def group_of(self, first: Any, args: tuple[Any, ...]) -> Any:
        """See `Launches`; the first argument is the tensor."""
        try:
            group = self._resolve(args[-1])
        except RuntimeError:
            return None  # the call is invalid
        # The behavior of a group written in Python is unknown.
        return group if type(group) is self._class else None

    def launched(
        self, first: Any, args: tuple[Any, ...], group: Group, result: Any, known: Sequence[int]
    ) -> None:
        """See `Launches`."""
        peer = None if self._root is None else args[self._root]
        split_bytes = None
        if self.operator.splits is not None:
            _, splits, _ = args  # the output's rows, the input's rows, the group
            split_bytes = bytes_by_member(first, splits)
        sent = self._record(
            self.operator, [first], group, known, peer=peer, tag=None, split_bytes=split_bytes
        )
        if sent is not None:
            self._pending.remember(result, sent)


class _Pending:
    """Messages whose result has not been waited for yet, by the storage of the result."""

    def __init__(self, context: PatchContext, observer: Observer) -> None:
        self._context = context
        self._observer = observer
        self._messages: dict[int, Message | Launched] = {}

    def launching(self, name: str) -> Callable[..., Any]:
        """Returns the kernel of an operator that launches messages."""
        redispatch, below = _below(name)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            result, messages = self._observer.collecting(
                redispatch, (keyset & below, *args), kwargs
            )
            if messages:
                try:
                    self._remember(result, messages)
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault("functional collective", error)
            return result

        return kernel

    def waiting(self, name: str) -> Callable[..., Any]:
        """The kernel of ``wait_tensor``."""
        redispatch, below = _below(name)

        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            return self._waited(lambda: redispatch(keyset & below, tensor), tensor)

        return kernel

    def around_wait(self, original: Callable[..., Any], offering: Offering) -> Callable[..., Any]:
        """The function of ``wait_tensor`` that Python calls."""

        def wait_tensor(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1:
                return original(*args, **kwargs)
            return self._waited(lambda: offering.passing_by(original, args), args[0])

        return wait_tensor

    def _waited(self, wait: Callable[[], Any], tensor: torch.Tensor) -> Any:
        """Waits, and records the message of the wait."""
        message = None
        # A tensor without storage has no message: the call comes from a compiler.
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            message = self._messages.pop(tensor.untyped_storage()._cdata, None)
        start = _now()
        try:
            return wait()
        finally:
            if message is not None:
                try:
                    self._observer.waits.waited(message, start, _now())
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault(_WAIT, error)

    def remember(self, result: torch.Tensor, message: Message | Launched) -> None:
        """Stores the messages that produce a result."""
        messages = self._messages
        messages[result.untyped_storage()._cdata] = message
        if len(messages) > _MAX_PENDING:
            messages.pop(next(iter(messages)), None)

    def _remember(self, result: Any, messages: Sequence[Message]) -> None:
        tensors = result if isinstance(result, (list, tuple)) else [result]
        # One message for all tensors, or one per tensor.
        each = messages if len(messages) == len(tensors) else [messages[-1]] * len(tensors)
        for tensor, message in zip(tensors, each, strict=True):
            self.remember(tensor, message)


def _below(name: str) -> tuple[Callable[..., Any], Any]:
    """Returns how to call the original kernel of an operator, and the dispatch keys for it."""
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    operator = getattr(torch.ops._c10d_functional, name).default
    return operator.redispatch, _dispatch_keyset_full_after(DispatchKey.BackendSelect)
