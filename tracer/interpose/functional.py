"""Functional collectives: ``torch.distributed._functional_collectives``.

They give a tensor instead of a handle, and whoever uses it first waits for it. Below them lie
the ``c10d`` operators, where their messages are recorded; what is added here is the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.recorder import Message

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.collectives import Observer
    from ddltrace.tracer.session import Session

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
# A job that never uses what it asked for must not make us remember without end.
_MAX_PENDING: Final = 4096


def install(session: Session, observer: Observer) -> None:
    """Registers kernels at the operators of functional collectives.

    Args:
        session: The recording rank.
        observer: Records the messages below.
    """
    import torch

    pending = _Pending(session, observer)
    library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    session.keep_alive(library)
    for name in (*_LAUNCHING, _WAIT):
        if hasattr(torch.ops._c10d_functional, name):
            make = pending.waiting if name == _WAIT else pending.launching
            library.impl(name, make(name), "BackendSelect", with_keyset=True)


class _Pending:
    """Messages whose result nobody has waited for yet, by the storage of that result."""

    def __init__(self, session: Session, observer: Observer) -> None:
        self._session = session
        self._observer = observer
        self._messages: dict[int, Message] = {}

    def launching(self, name: str) -> Callable[..., Any]:
        """The kernel of an operator that begins messages."""
        redispatch, below = _below(name)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            with self._observer.launched() as messages:
                result = redispatch(keyset & below, *args, **kwargs)
            if messages:
                try:
                    self._remember(result, messages)
                except Exception as error:  # noqa: BLE001 - the job goes on
                    self._session.fault(name, error)
            return result

        return kernel

    def waiting(self, name: str) -> Callable[..., Any]:
        """The kernel of ``wait_tensor``."""
        redispatch, below = _below(name)

        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            message = None
            try:
                message = self._messages.pop(tensor.untyped_storage()._cdata, None)
            except Exception as error:  # noqa: BLE001 - the job goes on
                self._session.fault(name, error)
            start = _now()
            try:
                return redispatch(keyset & below, tensor)
            finally:
                if message is not None:
                    try:
                        self._observer.waits.waited(message, start, _now())
                    except Exception as error:  # noqa: BLE001 - the job goes on
                        self._session.fault(name, error)

        return kernel

    def _remember(self, result: Any, messages: list[Message]) -> None:
        tensors = result if isinstance(result, (list, tuple)) else [result]
        # One message for all tensors, or one for each.
        each = messages if len(messages) == len(tensors) else [messages[-1]] * len(tensors)
        for tensor, message in zip(tensors, each, strict=True):
            self._messages[tensor.untyped_storage()._cdata] = message
        while len(self._messages) > _MAX_PENDING:
            self._messages.pop(next(iter(self._messages)))


def _below(name: str) -> tuple[Callable[..., Any], Any]:
    """How to call what an operator did before, and the dispatch keys for it."""
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    operator = getattr(torch.ops._c10d_functional, name).default
    return operator.redispatch, _dispatch_keyset_full_after(DispatchKey.BackendSelect)
