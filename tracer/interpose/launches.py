"""Collectives that Python launches, recorded around the method that launches them.

The kernels of `collectives.py` see every call, but those in Python are not cheap: PyTorch makes
Python objects of all arguments for them, and takes them apart again for what lies below. Where
Gloo tells the times, a collective on the CPU needs no such kernel: the method of `ProcessGroup` has
all its arguments at hand, and `native/gloo_messages.cpp` launches it past the kernel, measures its
tensors on the way, and gives it a place in the ring of `known_messages.py`. Whatever is not as
plain as that goes through the kernel as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ddltrace.tracer.native.library import NativeLibrary

if TYPE_CHECKING:
    from ddltrace.tracer.gloo_times import GlooTimes
    from ddltrace.tracer.interpose.collectives import Observer, Operator
    from ddltrace.tracer.interpose.groups import Group
    from ddltrace.tracer.session import Session

METHODS: Final[dict[str, tuple[str, str | type]]] = {
    "allreduce": ("allreduce_", "AllreduceOptions"),
    "broadcast": ("broadcast_", "BroadcastOptions"),
    "reduce": ("reduce_", "ReduceOptions"),
    "allgather": ("allgather_", "AllgatherOptions"),
    "_allgather_base": ("_allgather_base_", "AllgatherOptions"),
    "all_gather_single": ("_allgather_base_", "AllgatherOptions"),
    "reduce_scatter": ("reduce_scatter_", "ReduceScatterOptions"),
    "_reduce_scatter_base": ("_reduce_scatter_base_", "ReduceScatterOptions"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "ReduceScatterOptions"),
    "gather": ("gather_", "GatherOptions"),
    "scatter": ("scatter_", "ScatterOptions"),
    "alltoall": ("alltoall_", "AllToAllOptions"),
    "alltoall_base": ("alltoall_base_", "AllToAllOptions"),
    "all_to_all_single": ("alltoall_base_", "AllToAllOptions"),
    "barrier": ("barrier", "BarrierOptions"),
    "send": ("send", int),
    "recv": ("recv_", int),
}
"""Of each method: the operator that it calls, and the type of its last argument: the tag, or
options in PyTorch's bindings."""


Offer: TypeAlias = "tuple[int, Group]"
"""What a launch is to be known by: where Gloo's threads note its times, or
`NativeLibrary.UNRECORDED`; and its group."""


def install(session: Session, observer: Observer, operators: dict[str, Operator]) -> None:
    """Patches the methods of ``ProcessGroup``, if C++ can see what they launch.

    Args:
        session: The recording rank.
        observer: What records messages.
        operators: What is known of each operator.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as bindings

    library, gloo, known = session.native, observer.gloo, session.known
    if library is None or gloo is None or known is None or not known.see_launches():
        return
    offered = _Offered(library)
    group_class: Any = dist.ProcessGroup
    for method, (name, last) in METHODS.items():
        last_type = getattr(bindings, last, None) if isinstance(last, str) else last
        if hasattr(group_class, method) and last_type is not None:
            launches = _Launches(session, observer, gloo, operators[name], last_type)
            original = getattr(group_class, method)
            setattr(group_class, method, _around(original, launches, offered, session.fault))


_WAITED_ONCE: Final = 1  # of `NativeLibrary.offered`
_OPTIONS: Final = ("opts",)


class _Offered(threading.local):
    """What a thread offers.

    Attributes:
        cell: See `NativeLibrary.offered`.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self.cell = library.offered()


def _around(
    original: Callable[..., Any],
    launches: _Launches,
    offered: _Offered,
    fault: Callable[[str, Exception], None],
) -> Callable[..., Any]:
    """A method that records what it launches."""
    operator, observer, nothing = launches.operator, launches.observer, NativeLibrary.NOTHING
    waited_once = int(operator.waited_once)

    def method(process_group: Any, *args: Any, **kwargs: Any) -> Any:
        offer, cell = None, None
        try:
            if not kwargs:
                offer = launches.offer(process_group, args)
            elif tuple(kwargs) == _OPTIONS:
                args, kwargs = (*args, kwargs["opts"]), {}
                offer = launches.offer(process_group, args)
            cell = offered.cell
        except Exception as error:  # noqa: BLE001 - the job goes on
            fault("offer a launch", error)
        if offer is None or cell is None:
            return original(process_group, *args, **kwargs)
        former = cell[0]
        if former != nothing:
            # By a signal handler of the job's, in the middle of another launch.
            cell[0] = nothing
            try:
                return original(process_group, *args)
            finally:
                cell[0] = former
        try:
            cell[0], cell[_WAITED_ONCE] = offer[0], waited_once
            work = original(process_group, *args)
        finally:
            known = cell.tolist()
            cell[0] = nothing
        if known[0] < NativeLibrary.UNRECORDED:
            try:
                observer.launched_past(operator, args, offer, work, known)
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
        session: The recording rank.
        observer: What records messages.
        gloo: What takes down their times.
        operator: What the method calls.
        last_type: Of its last argument.
    """

    def __init__(
        self,
        session: Session,
        observer: Observer,
        gloo: GlooTimes,
        operator: Operator,
        last_type: type,
    ) -> None:
        self.observer = observer
        self._gloo = gloo
        self._recorder = session.recorder
        self._seen_group = session.groups.seen
        self.operator = operator
        self._last_type = last_type
        # Without tensors there is only that.
        self._num_args = 1 if operator.inputs == operator.outputs is None else operator.group + 1

    def offer(self, process_group: Any, args: tuple[Any, ...]) -> Offer | None:
        """To be called right before a launch.

        Args:
            process_group: Whose method was called.
            args: Its arguments.

        Returns:
            What it is to be known by, if it turns out to be of plain tensors on the CPU; None if a
            kernel has to see it.
        """
        if len(args) < self._num_args or type(args[-1]) is not self._last_type:
            return None
        observer = self.observer
        if not observer.active or observer.coalescing.messages is not None:
            return None
        group = self._seen_group(process_group)
        if group is None or not group.blocking.get("cpu"):
            return None  # a first message tells
        slot = NativeLibrary.UNRECORDED if self._recorder.paused else self._gloo.free_slot()
        return None if slot is None else (slot, group)
