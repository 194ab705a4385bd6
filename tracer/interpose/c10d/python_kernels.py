"""Registers kernels in Python at the dispatcher, which are not called while nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.native.library import NativeLibrary

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext


class PythonKernels:
    """The kernels of one namespace of operators.

    Without the native library they are called at all times, and return early while nothing is
    recorded.

    Args:
        context: The parts of the recording rank.
    """

    def __init__(self, context: PatchContext, namespace: str) -> None:
        import torch

        self._native = context.native
        self._namespace = namespace
        # Never destroyed: it is unsafe to unregister kernels at exit while messages are in flight.
        self._library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        context.keep_alive(self._library)

    def add(
        self, operator: str, kernel: Callable[..., Any], *, is_collective: bool = False
    ) -> None:
        """Registers a kernel right above the operator's backends.

        Args:
            operator: Name of the operator.
            kernel: Called with the dispatcher's keys and the operator's arguments.
            is_collective: Whether the operator launches one collective.
        """
        if self._native is not None:
            self._library.impl(operator, kernel, NativeLibrary.GATED, with_keyset=True)
            if self._native.gate(self._namespace, operator, is_collective=is_collective):
                return
        self._library.impl(operator, kernel, "BackendSelect", with_keyset=True)
