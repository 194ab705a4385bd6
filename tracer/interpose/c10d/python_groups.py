"""Records process groups written in Python, whose messages call no PyTorch operator.

The methods that send are wrapped when the subclass of ``ProcessGroup`` is defined. Most such groups
only forward to a PyTorch group, whose messages are recorded at operators, with more precise times.
Therefore, if messages are recorded below a method, the method itself is not recorded.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.interpose.c10d.arguments import first_tensor
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS
from ddltrace.tracer.interpose.c10d.python_launches import METHODS

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.c10d_operators import Operator
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.interpose.c10d.observer import Observer
    from ddltrace.tracer.interpose.patch_context import PatchContext
    from ddltrace.tracer.record.recorder import Message

# Beside those of `METHODS`: the operators that have the same arguments.
_OTHERS: Final = {
    "allreduce_coalesced": "allreduce_coalesced_",
    "allgather_coalesced": "allgather_coalesced_",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "monitored_barrier": "monitored_barrier_",
    "recv_anysource": "recv_any_source_",
}

_now = time.monotonic_ns


def install(context: PatchContext, observer: Observer) -> None:
    """Patches existing and future subclasses of ``ProcessGroup`` and ``Work``.

    Args:
        context: The parts of the recording rank.
        observer: Records messages.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import Work

    of_method = {method: name for method, (name, _) in METHODS.items()} | _OTHERS
    calls = _Calls(context, observer)

    def patch_group(group_class: Any) -> None:
        for method, name in of_method.items():
            original = vars(group_class).get(method)
            if isinstance(original, FunctionType):
                wrapper = _around(original, OPERATORS[name], calls, context)
                context.patches.put(group_class, method, wrapper)

    _patch_subclasses(context, dist.ProcessGroup, patch_group)
    _patch_subclasses(context, Work, observer.waits.patch_work)


def _patch_subclasses(context: PatchContext, base: Any, patch: Callable[[Any], None]) -> None:
    """Patches all Python subclasses of a class, each when it is defined."""

    def patch_safely(made: Any) -> None:
        try:
            patch(made)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("patch a class of the job's", error)

    def made_one(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        patch_safely(cls)

    base.__init_subclass__ = classmethod(made_one)
    made = list(base.__subclasses__())
    while made:
        patch_safely(made[-1])
        made.extend(made.pop().__subclasses__())


def _around(
    original: FunctionType, operator: Operator, calls: _Calls, context: PatchContext
) -> Callable[..., Any]:
    """Returns a method that records its messages, unless they are recorded below it."""

    @functools.wraps(original)
    def method(process_group: Any, *args: Any, **kwargs: Any) -> Any:
        call = None
        try:
            call = calls.begin(process_group, original, operator, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the job continues
            context.fault("begin a message of a group in Python", error)
        if call is None:
            return original(process_group, *args, **kwargs)
        work, status = None, "failed"
        try:
            work = original(process_group, *args, **kwargs)
            status = "ok"
            return work
        finally:
            try:
                calls.end(call, work, status)
            except Exception as error:  # noqa: BLE001 - the job continues
                context.fault("end a message of a group in Python", error)

    # As in `python_launches.py`: a call of the base class is recognized by the caller's name.
    code: Any = method
    code.__code__ = code.__code__.replace(co_name=original.__name__)
    return method


def _as_operator(
    operator: Operator, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Arranges the arguments of a method in the order of the corresponding operator.

    Args:
        method: The job's function.
        args: Its arguments, from the group on.
        kwargs: Keyword arguments.
    """
    if kwargs:
        bound = inspect.signature(method).bind(*args, **kwargs)
        args = (*bound.args, *bound.kwargs.values())
    if operator.inputs is None and operator.outputs is None:
        return [None] * (operator.group + 1)
    _, *own = args
    tensors, rest = own[: operator.group], own[operator.group :]
    if operator.tag is None:
        # The root is among the options, for which the operators have places of their own.
        root = getattr(own[-1], "rootRank", None)
        splits = rest if operator.splits is not None else []
        rest = splits if root is None else [root, root]
    return [*tensors, None, *rest]


@dataclass
class _Call:
    """A call of a method in progress.

    Attributes:
        operator: The operator of the same operation.
        args: Its arguments, as the operator has them.
        group: The group.
        method: The job's function.
        start: When it was called.
        former: The subject of this thread's messages before the call.
        message: The message recorded for the call so far.
    """

    operator: Operator
    args: Sequence[Any]
    group: Group
    method: Any
    start: int
    former: Any
    message: Message | None = None


class _Calls:
    """Turns calls of methods into messages.

    Args:
        context: The parts of the recording rank.
        observer: Records messages.
    """

    def __init__(self, context: PatchContext, observer: Observer) -> None:
        self._context = context
        self._observer = observer
        self._below = context.groups.below
        # Methods below which no message was recorded in their last call.
        self._senders: set[Any] = set()

    def begin(
        self,
        process_group: Any,
        method: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Call | None:
        """Called before the method.

        Args:
            method: The job's function.
            operator: The operator of the same operation.
            args: Its arguments.
            kwargs: Keyword arguments.

        Returns:
            The argument of `end`; None if the call is part of another call, or is not recorded.
        """
        observer, registry = self._observer, self._context.registry
        descriptions = observer.descriptions
        below = self._below
        if below.outer is not None or not observer.active:
            return None
        as_operator = _as_operator(operator, method, (process_group, *args), kwargs)
        group = self._context.groups.of(process_group)
        call = _Call(operator, as_operator, group, method, _now(), registry.carried.now)
        if self._context.recorder.paused:
            descriptions.leave_out(operator, as_operator, group)
            return None
        caller = sys._getframe(1).f_back  # of the method
        bucket = descriptions.bucket_of(operator, as_operator, group, caller)
        try:
            if bucket is not None:
                registry.carried.now = bucket
            if method in self._senders:
                # Before the call: one that hangs is to be seen.
                call.message = descriptions.describe(
                    operator, as_operator, group, call.start, seam="python group"
                )
        except BaseException:
            registry.carried.now = call.former
            raise
        below.outer, below.messages = group, 0
        return call

    def end(self, call: _Call, work: Any, status: str) -> None:
        """Called after the method.

        Args:
            call: The result of `begin`.
            work: The result of the method.
            status: The status of the call's end.
        """
        observer = self._observer
        passes_on = self._below.messages
        self._below.outer = None
        try:
            message = call.message
            if passes_on:
                self._senders.discard(call.method)
            elif message is None:
                self._senders.add(call.method)
                message = observer.descriptions.describe(
                    call.operator, call.args, call.group, call.start, seam="python group"
                )
        finally:
            self._context.registry.carried.now = call.former
        if message is None:
            return
        if status != "ok" or not observer.is_work(work):
            self._context.recorder.complete(message, _now(), "host", status)
            return
        first = first_tensor(call.args[: call.operator.group])
        on_host = first is None or first.is_cpu
        observer.follow(call.operator, message, work, on_host=on_host)
