"""Collectives that Python launches, recorded around the method that launches them.

The kernels of `collectives.py` see every call, but those in Python are not cheap: PyTorch makes
Python objects of all arguments for them, and takes them apart again for what lies below. Where
Gloo tells the times, a collective on the CPU needs no such kernel: the method of `ProcessGroup` has
all its arguments at hand, and `native/gloo_messages.cpp` launches it past the kernel. Whatever is
not as plain as that goes through the kernel as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.tracer.interpose.arguments import first_tensor

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.collectives import Observer, Operator
    from ddltrace.tracer.interpose.groups import Group
    from ddltrace.tracer.native.library import NativeLibrary

METHODS: Final = {
    "allreduce": ("allreduce_", "AllreduceOptions"),
    "broadcast": ("broadcast_", "BroadcastOptions"),
    "reduce": ("reduce_", "ReduceOptions"),
    "allgather": ("allgather_", "AllgatherOptions"),
    "_allgather_base": ("_allgather_base_", "AllgatherOptions"),
    "all_gather_single": ("_allgather_base_", "AllgatherOptions"),
    "gather": ("gather_", "GatherOptions"),
    "scatter": ("scatter_", "ScatterOptions"),
    "alltoall": ("alltoall_", "AllToAllOptions"),
    "alltoall_base": ("alltoall_base_", "AllToAllOptions"),
    "all_to_all_single": ("alltoall_base_", "AllToAllOptions"),
}
"""Of each method: the operator that it calls, and the last of its arguments."""


class Offer(NamedTuple):
    """What a launch is to be known by.

    Attributes:
        slot: Where Gloo's threads note its times, or `NativeLibrary.UNRECORDED`.
        group: Its group.
    """

    slot: int
    group: Group


def install(
    observer: Observer,
    library: NativeLibrary,
    operators: dict[str, Operator],
    fault: Callable[[str, Exception], None],
) -> None:
    """Patches the methods of ``ProcessGroup``.

    Args:
        observer: What records messages.
        library: What launches past Python's kernels.
        operators: What is known of each operator.
        fault: Told of what goes wrong here.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as bindings

    group_class: Any = dist.ProcessGroup
    for method, (name, options) in METHODS.items():
        options_class = getattr(bindings, options, None)
        if hasattr(group_class, method) and options_class is not None:
            launches = _Launches(observer, operators[name], options_class)
            original = getattr(group_class, method)
            setattr(group_class, method, _around(original, launches, library, fault))


def _around(
    original: Callable[..., Any],
    launches: _Launches,
    library: NativeLibrary,
    fault: Callable[[str, Exception], None],
) -> Callable[..., Any]:
    """A method that records what it launches."""
    offer_slot, withdraw, nothing = library.offer, library.withdraw, library.NOTHING

    def method(process_group: Any, *args: Any, **kwargs: Any) -> Any:
        offer = None
        try:
            offer = None if kwargs else launches.offer(process_group, args)
        except Exception as error:  # noqa: BLE001 - the job goes on
            fault("offer a launch", error)
        if offer is None:
            return original(process_group, *args, **kwargs)
        launched_ns, former = 0, nothing
        try:
            former = offer_slot(offer.slot)
            work = original(process_group, *args)
        finally:
            launched_ns = withdraw(former)
        if launched_ns:
            try:
                launches.record(offer, args, work, launched_ns)
            except Exception as error:  # noqa: BLE001 - the job goes on
                fault("record a launch", error)
        return work

    method.__doc__, method.__name__ = original.__doc__, original.__name__
    # A process group in Python that leaves this method to its base class is asked for it by the
    # base class again; PyTorch sees that it comes from there by the name of the calling code.
    method.__code__ = method.__code__.replace(co_name=original.__name__)
    return method


class _Launches:
    """The launches by one method.

    Args:
        observer: What records messages.
        operator: What it calls.
        options_class: Of the last argument.
    """

    def __init__(self, observer: Observer, operator: Operator, options_class: type) -> None:
        from torch import Tensor
        from torch.nn import Parameter

        self._observer = observer
        self._operator = operator
        self._options_class = options_class
        self._plain = (Tensor, Parameter)

    def offer(self, process_group: Any, args: tuple[Any, ...]) -> Offer | None:
        """To be called right before a launch.

        Args:
            process_group: Whose method was called.
            args: Its arguments.

        Returns:
            What it is to be known by; None if a kernel has to see it.
        """
        observer, operator = self._observer, self._operator
        if len(args) <= operator.group or type(args[-1]) is not self._options_class:
            return None
        first = first_tensor(args[: operator.group])
        if type(first) not in self._plain or not first.is_cpu or first.is_sparse:
            return None
        return observer.offer(process_group)

    def record(self, offer: Offer, args: tuple[Any, ...], work: Any, launched_ns: int) -> None:
        """To be called after a launch past the kernel.

        Args:
            offer: What was offered.
            args: The arguments of the method.
            work: What it returned.
            launched_ns: When the launch began.
        """
        operator = self._operator
        root = None if operator.peer is None else args[-1].rootRank
        # As the operator has them, whose root comes after the group or one place later.
        as_operator = (*args[: operator.group], None, root, root)
        self._observer.launched_past(operator, as_operator, offer, work, launched_ns)
