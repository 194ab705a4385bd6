"""Records messages at methods of ``ProcessGroup``, because a Python kernel is more expensive.

For a Python kernel, PyTorch converts all arguments to Python objects and back for the kernel below
it. If Gloo's threads record the times, a collective on the CPU needs no such kernel: the method of
``ProcessGroup`` has all arguments, and `native/gloo_messages.cpp` launches it past the kernel,
measures its tensors and assigns a slot in the ring of `known_messages.py`. All other launches go
through the kernels of `c10d_kernels.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from ddltrace.tracer.interpose.c10d.arguments import bytes_by_member, flatten, name_of
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS
from ddltrace.tracer.native.layout import OFFER
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.recorder import Launched, Message
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.c10d.c10d_operators import Operator
    from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
    from ddltrace.tracer.interpose.c10d.observer import Observer
    from ddltrace.tracer.interpose.patch_context import PatchContext

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
"""Method -> the operator that it calls, and the type of its last argument: the tag, or options in
PyTorch's bindings."""


def install(context: PatchContext, observer: Observer) -> Offering | None:
    """Patches the methods of ``ProcessGroup``, if C++ can observe their launches.

    Args:
        context: The parts of the recording rank.
        observer: Records messages.

    Returns:
        The object that offers launches; None if C++ cannot observe them.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as bindings

    library, gloo, known = context.native, context.gloo, context.known
    if library is None or gloo is None or known is None or not known.see_launches():
        return None
    offering = Offering(context, observer, gloo, known, library)
    group_class: Any = dist.ProcessGroup
    for method, (name, last) in METHODS.items():
        last_type = getattr(bindings, last, None) if isinstance(last, str) else last
        if hasattr(group_class, method) and last_type is not None:
            launches = _ByMethod(offering, OPERATORS[name], last_type)
            replacement = offering.around(getattr(group_class, method), launches)
            context.patches.put(group_class, method, replacement)
    return offering


_WAITED_ONCE: Final = OFFER["waited_once"]
_take_offer: Final = itemgetter(
    *(OFFER[name] for name in ("state", "bytes", "out_bytes", "address", "storage", "place"))
)
_OPTIONS: Final = ("opts",)
_ABSENT: Final = object()


class _Offered(threading.local):
    """The launch that a thread offers.

    Attributes:
        cell: See `NativeLibrary.offered`.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self.cell = library.offered()


class Launches(Protocol):
    """The launches by one function.

    Attributes:
        operator: The called operator.
        num_args: Minimum number of arguments after the first for which a launch may be offered.
        last_type: Type of the last of these arguments.
    """

    operator: Operator
    num_args: int
    last_type: type

    @property
    def group_of(self) -> Callable[[Any, tuple[Any, ...]], Any] | None:
        """Returns the process group from all arguments; None if it is the first argument."""

    def launched(
        self, first: Any, args: tuple[Any, ...], group: Group, result: Any, known: Sequence[int]
    ) -> None:
        """Called after a launch past the kernel.

        Args:
            first: The first argument of the function.
            args: The others.
            result: The result of the function.
            known: The values of `NativeLibrary.offered` after the launch.
        """


class Offering:
    """Offers launches by Python to C++.

    Args:
        context: The parts of the recording rank.
        observer: Records messages.
        gloo: Records the times of Gloo messages.
        known: Creates messages from the records of C++.
        library: The native library, which observes the launches.
    """

    def __init__(
        self,
        context: PatchContext,
        observer: Observer,
        gloo: GlooTimes,
        known: KnownMessages,
        library: NativeLibrary,
    ) -> None:
        self.observer = observer
        self._gloo = gloo
        self._known = known
        self._name = observer.descriptions.name
        self._below = context.groups.below
        self._recorder = context.recorder
        self._seen_group = context.groups.seen
        self._offered = _Offered(library)
        self._fault = context.fault

    def record(
        self,
        operator: Operator,
        tensors: list[torch.Tensor],
        group: Group,
        known: Sequence[int],
        *,
        peer: int | None,
        tag: int | None,
        split_bytes: list[int] | None = None,
    ) -> Launched | Message | None:
        """Records a message that was launched past the kernel.

        Runs in every launch, so it makes few calls.

        Args:
            operator: The called operator.
            known: The values of `NativeLibrary.offered` after the launch.
            peer: Rank in the group of the root, or of the other side.
            split_bytes: What an all-to-all sends to each member, if that is known.

        Returns:
            The recorded message; None if it is only counted. The end of a `Message` is not
            reported.
        """
        launched, num_bytes, out_bytes, address, storage, place = _take_offer(known)
        if tag is None:
            seq: int | None = group.next_collective()
        else:
            seq = group.next_between(operator.op, group.global_rank(peer), tag)
        if place < 0:
            return None  # in a pause; counted, so that later numbers agree
        if self._below.outer is not None:
            self._below.messages += 1
        name, parameters, dtype = operator.op, None, None
        if tensors:
            dtype = tensors[0].dtype
            at = (address, storage) if address else None
            name, parameters = self._name(operator, group, tensors, at=at)
        carried = None if parameters is None else tuple(parameters)
        like = (operator.op, name, dtype, carried, tag)
        once = operator.waited_once
        sent = self._known.launched(
            place,
            -launched,
            like,
            group,
            seq=seq,
            peer=peer,
            waited_once=once,
            split_bytes=split_bytes,
        )
        if sent is not None:
            return sent
        message = self._recorder.new_message(operator.op, group.name, -launched, "method")
        message.name, message.tensors = name, parameters
        message.dtype = None if dtype is None else name_of(dtype)
        if dtype is None:  # PyTorch has made up a tensor to have something to launch
            num_bytes = out_bytes = 0
        message.bytes = None if operator.op == "recv" else num_bytes
        message.out_bytes = None if operator.op == "send" else out_bytes
        message.seq, message.tag, message.peer = seq, tag, group.global_rank(peer)
        self._recorder.keep_splits(message.id, split_bytes)
        return message

    def _of(self, process_group: Any) -> Group | None:
        """The group of a launch that may be offered; None if a kernel has to see it."""
        observer = self.observer
        if not observer.active or observer.coalescing.messages is not None:
            return None
        group = self._seen_group(process_group)
        if group is None or not group.blocking.get("cpu"):
            return None  # known after the first message
        return group if self._gloo.listens else None

    def passing_by(self, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls a function that launches nothing, bypassing the Python kernel if nothing is
        offered."""
        cell = self._offered.cell
        former, cell[0] = cell[0], NativeLibrary.UNRECORDED
        try:
            return original(*args)
        finally:
            cell[0] = former

    def around(self, original: Callable[..., Any], launches: Launches) -> Callable[..., Any]:
        """Returns a function that records its launches."""
        offered, fault, recorder = self._offered, self._fault, self._recorder
        nothing, unrecorded = NativeLibrary.NOTHING, NativeLibrary.UNRECORDED
        on_offer = NativeLibrary.OFFERED
        waited_once = int(launches.operator.waited_once)
        num_args, last_type, group_of = launches.num_args, launches.last_type, launches.group_of
        group_to_offer, launched = self._of, launches.launched

        # The first argument may be an object of the job, see below.
        def method(first: Any = _ABSENT, /, *args: Any, **kwargs: Any) -> Any:
            group, cell = None, None
            try:
                if kwargs and tuple(kwargs) == _OPTIONS:
                    args, kwargs = (*args, kwargs["opts"]), {}
                if not kwargs and len(args) >= num_args and type(args[-1]) is last_type:
                    group = group_to_offer(first if group_of is None else group_of(first, args))
                    cell = offered.cell
            except Exception as error:  # noqa: BLE001 - the job continues
                fault("offer a launch", error)
            if group is None or cell is None:
                if first is _ABSENT:  # all arguments are keyword arguments, or the call is invalid
                    return original(**kwargs)
                return original(first, *args, **kwargs)
            former = cell[0]
            if former != nothing:
                # From a mode or a signal handler of the job, inside another launch.
                cell[0] = nothing
                try:
                    return original(first, *args)
                finally:
                    cell[0] = former
            try:
                cell[0], cell[_WAITED_ONCE] = (
                    unrecorded if recorder.paused else on_offer,
                    waited_once,
                )
                result = original(first, *args)
            finally:
                known = cell.tolist()
                cell[0] = nothing
            if known[0] < unrecorded:
                try:
                    launched(first, args, group, result, known)
                except Exception as error:  # noqa: BLE001 - the job continues
                    fault("record a launch", error)
            return result

        method.__doc__, method.__name__ = original.__doc__, original.__name__
        # If a process group in Python inherits this method, the base class calls the method of the
        # subclass again. PyTorch recognizes such a call by the caller's name and the first
        # argument.
        method.__code__ = method.__code__.replace(co_name=original.__name__)
        return method


class _ByMethod:
    """The launches by one method of ``ProcessGroup``.

    Args:
        offering: Offers them.
        operator: The called operator.
        last_type: Type of the last argument.
    """

    def __init__(self, offering: Offering, operator: Operator, last_type: type) -> None:
        self.operator, self.last_type = operator, last_type
        self.group_of: None = None
        self._record, self._follow = offering.record, offering.observer.follow_launch
        self._remember = offering.observer.waits.works.add
        # Positions of the tensors; later ones are used only if earlier ones hold none.
        self._sides = [side for side in (operator.inputs, operator.outputs) if side is not None]
        # A call without tensors has only this argument.
        self.num_args = operator.group + 1 if self._sides else 1
        self._is_between_two = operator.op in P2P_OPS
        self._has_root = operator.peer is not None and not self._is_between_two
        self._is_all_to_all = operator.op == "all_to_all"

    def launched(
        self, _: Any, args: tuple[Any, ...], group: Group, result: Any, known: Sequence[int]
    ) -> None:
        """See `Launches`."""
        tensors: list[torch.Tensor] = []
        for side in self._sides:
            if not tensors:
                tensors = flatten(args[side])
        peer = tag = split_bytes = None
        if self._is_between_two:
            _, peer, tag = args
        elif self._has_root:
            peer = args[-1].rootRank
        elif self._is_all_to_all:
            # Of one tensor: output, input, the output's rows, the input's rows, options.
            split_bytes = bytes_by_member(args[1], args[-2] if len(args) > 4 else ())
        sent = self._record(
            self.operator, tensors, group, known, peer=peer, tag=tag, split_bytes=split_bytes
        )
        if sent is not None:
            self._remember(result, sent)
            if type(sent) is Message:
                self._follow(self.operator, result, sent)
