"""Records ``torch.distributed.rpc``: function calls on other ranks.

Its agent (TensorPipe) does not use ``c10d``; every call from Python goes through one of six
functions of ``torch.distributed.rpc.api``. A call is recorded as a message with operation ``rpc``:
its peer is the callee, its bytes are those of the request (the pickled function and its arguments,
including tensors), and it is complete when the response has arrived.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.record.recorder import Message
from ddltrace.tracer.trace.run_info import GroupInfo

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.waits import Waits
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns
_GROUP: Final = "rpc"
_CALLS: Final = (
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
)


def join(module: Any, context: PatchContext, waits: Waits | None) -> None:
    """Records the calls of a process that has joined the RPC group.

    Args:
        module: ``torch.distributed.rpc.api``.
        context: The parts of the recording rank.
        waits: The recorder of the host's waits; None if it could not be installed.
    """
    workers = module._get_current_rpc_agent().get_worker_infos()
    ids = {worker.name: worker.id for worker in workers}
    calls = getattr(module, "_ddltrace_calls", None)
    if calls is not None:  # it left the group earlier and joins again
        calls.ids = ids
        return
    ranks = tuple(sorted(ids.values()))
    context.record.add_group(GroupInfo(_GROUP, "torch.distributed.rpc", "tensorpipe", ranks))
    calls = module._ddltrace_calls = _Calls(context, waits, ids)
    for name in _CALLS:
        if hasattr(module, name):
            context.patches.put(module, name, calls.observed(name, getattr(module, name)))
    reference_class = module.PyRRef
    context.patches.put(reference_class, "to_here", calls.fetching(reference_class.to_here))


class _Calls:
    """Records calls and their responses.

    Attributes:
        ids: Number of each worker, by name.
    """

    def __init__(self, context: PatchContext, waits: Waits | None, ids: dict[str, int]) -> None:
        self._context = context
        self._waits = waits
        self.ids = ids

    def observed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps one of the calling functions so that its calls are recorded."""
        pickled = name.endswith("python_udf")
        remote = name.startswith("_invoke_remote")

        @functools.wraps(original)
        def call(destination: Any, *args: Any, **kwargs: Any) -> Any:
            message = None
            try:
                message = self._begin(destination)
                if pickled:
                    message.bytes = len(args[0]) + _num_bytes(args[1])
                else:
                    # Only the C++ pickler knows the size of the request.
                    message.name = str(args[0])
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault(name, error)
            result = original(destination, *args, **kwargs)
            if message is not None:
                try:
                    self._follow(message, result._get_future() if remote else result)
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault(name, error)
            return result

        return call

    def fetching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``RRef.to_here``, which fetches a copy of a value from its owner."""

        @functools.wraps(original)
        def to_here(reference: Any, *args: Any, **kwargs: Any) -> Any:
            message = None
            try:
                if not reference.is_owner():
                    message = self._begin(reference.owner())
                    message.name = "to_here"
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("to_here", error)
            status = "failed"
            try:
                result = original(reference, *args, **kwargs)
                status = "ok"
                return result
            finally:
                if message is not None:
                    try:
                        self._fetched(message, _now(), status)
                    except Exception as error:  # noqa: BLE001 - the job continues
                        self._context.fault("to_here", error)

        return to_here

    def _fetched(self, message: Message, end: int, status: str) -> None:
        self._context.recorder.complete(message, end, "host", status)
        if self._waits is not None:
            self._waits.record(message, message.name, message.start_ns, end)

    def _begin(self, destination: Any) -> Message:
        message = self._context.recorder.new_message("rpc", _GROUP, _now(), "rpc")
        if isinstance(destination, str):
            message.peer = self.ids.get(destination)
        else:
            message.peer = destination.id
        return message

    def _follow(self, message: Message, future: Any) -> None:
        recorder = self._context.recorder

        def done(answer: Any) -> None:
            end = _now()
            try:
                answer.value()
                status = "ok"
            except Exception:  # noqa: BLE001 - the job gets the same error from its own wait
                status = "failed"
            try:
                recorder.complete(message, end, "host", status)
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("rpc", error)

        future.add_done_callback(done)
        if self._waits is not None:
            self._waits.futures.add(future, message)


def _num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
