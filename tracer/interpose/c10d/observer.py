"""Turns the calls of ``c10d`` operators into messages; see `c10d_kernels.py`."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddltrace.tracer.interpose.c10d.arguments import first_tensor
from ddltrace.tracer.interpose.c10d.c10d_operators import OPERATORS, Operator
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.interpose.c10d.message_descriptions import Descriptions, Sparse
from ddltrace.tracer.interpose.c10d.reaper import Reapers
from ddltrace.tracer.interpose.c10d.waits import Waits
from ddltrace.tracer.interpose.cuda import MessageTimer, asking_from_any_thread
from ddltrace.tracer.record.recorder import Message
from ddltrace.tracer.timing.stream_messages import StreamMessages
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns
_ENDED_BY_WAIT = {operator.op for operator in OPERATORS.values() if operator.waited_once}


class _Launch(NamedTuple):
    """The sources of the times of a message that is being launched.

    Attributes:
        start: When the operator was called.
        on_device: Whether the message runs on the device that is timed.
        mark: Position in the device's stream right before the launch, where it is needed.
        slot: Slot in which Gloo's threads record its times; -1 if they do not.
        is_captured: Whether the message becomes part of a graph instead of being sent.
        sparse: What a sum of sparse tensors carries; None for other messages.
    """

    start: int
    on_device: bool = False
    mark: int | None = None
    slot: int = -1
    is_captured: bool = False
    sparse: Sparse | None = None


class _Collected(threading.local):
    """Messages that a thread launches below a functional collective.

    Attributes:
        messages: Messages recorded by Python kernels; None if they are not collected.
    """

    messages: list[Message] | None = None


class _Coalescing(threading.local):
    """Messages that a thread launches as one coalesced operation.

    Attributes:
        messages: Messages launched so far; None if the thread is not coalescing.
        mark: Position in the device's stream right before the first of them; None on the CPU.
    """

    messages: list[Message] | None = None
    mark: int | None = None

    def add(self, message: Message, mark: int | None) -> None:
        """Adds a message; of the first one, its mark."""
        assert self.messages is not None
        if not self.messages:
            self.mark = mark
        self.messages.append(message)


class Observer:
    """Turns operator calls into messages.

    Attributes:
        active: Whether messages are recorded.
        waits: Where the host's waits are recorded.
        gloo: Records the times of Gloo messages; None if they are not recorded.
        coalescing: Messages that this thread launches as one.
        descriptions: Describes messages.
    """

    def __init__(self, context: PatchContext) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import Work

        self._context = context
        self._recorder = context.recorder
        self._groups = context.groups
        self._work_class = Work
        self._unbox_work = Work.unbox
        self._unbox_group = dist.ProcessGroup.unbox
        self.waits = Waits(context, self._received, self._ordered)
        is_completed = asking_from_any_thread(context, self.waits.original_is_completed)
        self._reapers = Reapers(
            self.waits.original_wait,
            is_completed,
            self._completed,
            self.waits.works.release,
            context.fault,
        )
        self.gloo = context.gloo
        self._known = context.known
        self._ddp = context.ddp
        self.descriptions = Descriptions(context)
        self._recorder.collectors.append(self._collect)
        self._collected = _Collected()
        self.coalescing = _Coalescing()
        self._timer = MessageTimer(context)
        work_class: Any = Work  # its stub lacks a method
        self._streams = StreamMessages(
            is_completed, work_class._get_duration, self._timer.passed_ns, self._ended_on_device
        )
        context.device.tasks += [self._streams.poll, self.waits.works.release_served]
        context.device.when_failed.append(self._streams.lose)
        self.active = not self._recorder.off
        self._stopped = False
        self._below = context.groups.below
        group_class: Any = dist.ProcessGroup
        for method, around in (
            ("_start_coalescing", self._begins),
            ("_end_coalescing", self._ends),
        ):
            context.patches.put(group_class, method, around(getattr(group_class, method)))

    def stop(self, timeout_s: float) -> None:
        """Stops recording after the messages launched so far."""
        self.active, self._stopped = False, True
        deadline = time.monotonic() + timeout_s
        self._streams.stop(timeout_s)
        self._reapers.stop(max(0.0, deadline - time.monotonic()))
        if self._known is not None:
            self._known.stop(max(0.0, deadline - time.monotonic()))

    def switch(self, on: bool) -> None:
        """Switches recording on or off. The ends of messages that the job waits for go unseen."""
        self.active = on and not self._stopped
        if not on:
            for message in list(self._recorder.open.values()):
                if message.op in _ENDED_BY_WAIT:
                    self._recorder.release(message)

    def abandon(self) -> None:
        """Releases all objects of the job, in a forked child, which has no reapers."""
        self.active, self._stopped = False, True
        self._streams.abandon()
        if self._known is not None:
            self._known.abandon()

    def collecting(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[Message]]:
        """Calls a function; returns its result and the messages that Python kernels recorded."""
        collected = self._collected
        messages: list[Message] = []
        collected.messages = messages
        try:
            return call(*args, **kwargs), messages
        finally:
            collected.messages = None

    def kernel(self, name: str, operator: Operator) -> Callable[..., Any]:
        """Returns the dispatcher kernel for one operator."""
        import torch
        from torch._C import DispatchKey, _dispatch_keyset_full_after

        redispatch = getattr(torch.ops.c10d, name).default.redispatch
        below, meta = _dispatch_keyset_full_after(DispatchKey.BackendSelect), DispatchKey.Meta
        fault = self._context.fault
        end_launch = None if self.gloo is None else self.gloo.end_launch

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            start = _now()
            launch = None
            try:
                if not keyset.has(meta):  # nothing is sent of tensors without elements
                    launch = self._begin(operator, args, start)
            except Exception as error:  # noqa: BLE001 - the job continues
                fault(f"time {name}", error)
            try:
                result = redispatch(keyset & below, *args, **kwargs)
            finally:
                if launch is not None and launch.slot >= 0 and end_launch is not None:
                    end_launch()
            if launch is not None:
                try:
                    self._record(operator, args, kwargs, result, launch)
                except Exception as error:  # noqa: BLE001 - the job continues
                    fault(f"record {name}", error)
            return result

        def blocking_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            message = None
            if self.active and not keyset.has(meta):
                try:
                    if not (self._recorder.paused and self._passes(operator, args)):
                        # Before the call, so that a message that hangs is in the trace.
                        group = self._groups.of(self._unbox_group(args[operator.group]))
                        message = self.descriptions.describe(operator, args, group, _now())
                except Exception as error:  # noqa: BLE001 - the job continues
                    fault(f"record {name}", error)
            status = "failed"
            try:
                result = redispatch(keyset & below, *args, **kwargs)
                status = "ok"
                return result
            finally:
                if message is not None:
                    end = _now()
                    try:
                        self._recorder.complete(message, end, "host", status)
                        self.waits.record(message, message.name, message.start_ns, end)
                    except Exception as error:  # noqa: BLE001 - the job continues
                        fault(f"record {name}", error)

        return blocking_kernel if operator.blocks else kernel

    def follow_launch(self, operator: Operator, work: Any, message: Message) -> None:
        """Follows a Gloo message on the CPU whose end is not reported otherwise.

        Args:
            operator: The called operator.
            work: The returned handle.
        """
        if not operator.waited_once:
            self._reapers.follow(work, message, poll=False)

    def mark_before(self, tensor: torch.Tensor) -> int | None:
        """Marks the current stream before a call that launches its message into it.

        Args:
            tensor: A tensor of the message.

        Returns:
            The mark, which `end_custom` consumes; None if the message is not timed by the device.
        """
        timer = self._timer
        if tensor.is_cuda and timer.in_use() and timer.times(tensor):
            return timer.mark()
        return None

    def forget_mark(self, mark: int | None) -> None:
        """Consumes a result of `mark_before`, of a call that sent nothing."""
        self._timer.forget(mark)

    def end_custom(
        self, message: Message, tensor: torch.Tensor | None, mark: int | None, *, is_unseen: bool
    ) -> None:
        """Ends a message that a library has launched by itself, after its call.

        Args:
            tensor: A tensor of the message, which tells its device.
            mark: The result of `mark_before`.
            is_unseen: Whether its stream continues before the message has ended.
        """
        if is_unseen:
            self._timer.forget(mark)
            self._recorder.release(message)
        elif mark is not None:
            self._timer.end([message], mark)
        elif tensor is not None and not tensor.is_cuda:
            self._recorder.complete(message, _now(), "host")
        else:
            self._recorder.release(message)

    def is_work(self, value: Any) -> bool:
        """Whether a value is the handle of a message."""
        return isinstance(value, self._work_class)

    def follow(self, operator: Operator, message: Message, work: Any, *, on_host: bool) -> None:
        """Records the end of a message of a Python group.

        Args:
            operator: The operation of the group.
            work: Its handle.
            on_host: Whether a wait for the handle blocks until the message is complete.
        """
        self.waits.works.add(work, message)
        if self.waits.is_in_python(work) or (on_host and operator.waited_once):
            return
        if not on_host:
            self.waits.stream_ordered.add(message.id)
        self._reapers.follow(work, message, poll=True)

    def _begin(self, operator: Operator, args: Sequence[Any], start: int) -> _Launch | None:
        """Called before a launch: returns the sources of its times; None if there are none."""
        if not self.active or (self._recorder.paused and self._passes(operator, args)):
            return None
        first = first_tensor(args[: operator.group])
        if first is None:
            return None  # the call is invalid
        mark = None
        on_device = first.is_cuda and self._timer.in_use()
        if on_device:
            if self._timer.is_capturing():
                return _Launch(start, is_captured=True)
            on_device = self._timer.times(first)
            if on_device and self._is_marked_before(operator, args, first):
                mark = self._timer.mark(free=True)
        sparse = None
        if operator.op == "all_reduce" and first.is_sparse:
            group = self._groups.of(self._unbox_group(args[operator.group]))
            sparse = self.descriptions.sparse(operator, args, group)
        gloo = self.gloo
        if gloo is None:
            return _Launch(start, on_device, mark, sparse=sparse)
        slot = gloo.begin_launch(waited_once=operator.waited_once)
        return _Launch(start, on_device, mark, slot, sparse=sparse)

    def _is_marked_before(
        self, operator: Operator, args: Sequence[Any], first: torch.Tensor
    ) -> bool:
        """Whether the times of a message on the device need a mark before its launch.

        The other messages run in a stream of the communication library, see `StreamMessages`.
        """
        together = self.coalescing.messages
        if together is not None:
            return not together
        if not operator.is_asynchronous(args):
            return True
        process_group = self._unbox_group(args[operator.group])
        return self._groups.wait_blocks(process_group, self._groups.of(process_group), first)

    def _passes(self, operator: Operator, args: Sequence[Any]) -> bool:
        """Whether a call is not recorded during a pause; it is counted, so that numbers agree."""
        if operator is OPERATORS["recv_any_source_"]:
            return False  # the number of a receive from any source is known only at its end
        group = self._groups.of(self._unbox_group(args[operator.group]))
        self.descriptions.leave_out(operator, args, group)
        return True

    def is_captured(self, tensor: torch.Tensor) -> bool:
        """Whether a message of a tensor would become part of a graph instead of being sent."""
        return tensor.is_cuda and self._timer.in_use() and self._timer.is_capturing()

    def _record(
        self,
        operator: Operator,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        launch: _Launch,
    ) -> None:
        group = self._groups.of(self._unbox_group(args[operator.group]))
        if launch.is_captured:
            self.descriptions.capture(operator, args, group, launch.start)
        else:
            self._record_sent(operator, args, kwargs, result, launch)

    def _record_sent(
        self,
        operator: Operator,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        launch: _Launch,
    ) -> None:
        process_group = self._unbox_group(args[operator.group])
        group = self._groups.of(process_group)
        by_engine = self.descriptions.is_reducers(operator, sys._getframe())
        message = self.descriptions.describe(
            operator, args, group, launch.start, by_engine=by_engine, sparse=launch.sparse
        )
        first = first_tensor(args[: operator.group])
        blocking = self._groups.wait_blocks(process_group, group, first)
        if group.sends_nothing:
            self._recorder.complete(message, _now(), "host")
            return
        if self.coalescing.messages is not None:
            self.coalescing.add(message, launch.mark)
            return  # begins and ends with the others
        timed_by_gloo = (
            blocking and first.is_cpu and self._is_timed_by_gloo(operator, launch, message)
        )
        if timed_by_gloo:
            self._make_known(message, group, by_engine=by_engine)
            if by_engine:
                return  # only C++ code holds the handle
        work = self._work(result)
        collected = self._collected.messages
        if collected is not None:
            collected.append(message)
        elif work is not None:
            self.waits.works.add_newest(work, message)
        if work is None:
            self._timer.end([message], launch.mark)
            return  # nothing to wait for
        if launch.on_device and not blocking:
            self.waits.stream_ordered.add(message.id)
            mark = self._timer.mark(free=True)  # `_begin` has found it free
            self._timer.forget(launch.mark)
            # DDP keeps its buckets.
            self._streams.follow(_stream_of(message), work, [message], mark, memory_lasts=by_engine)
            return
        self._timer.start(message, launch.mark)
        if timed_by_gloo or (blocking and operator.waited_once):
            return
        if not blocking:
            self.waits.stream_ordered.add(message.id)
        if operator.is_asynchronous(args, kwargs) or not blocking:
            # On another device, the wait would order a stream of the job.
            poll = not (blocking and first.is_cpu)
            self._reapers.follow(work, message, poll=poll)

    def _begins(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``_start_coalescing``: messages until ``_end_coalescing`` are launched as one."""

        @functools.wraps(original)
        def start_coalescing(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.coalescing.messages = []
            return result

        return start_coalescing

    def _ends(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end_coalescing(*args: Any, **kwargs: Any) -> Any:
            try:
                work = original(*args, **kwargs)
            finally:
                messages, mark = self.coalescing.messages or [], self.coalescing.mark
                self.coalescing.messages = self.coalescing.mark = None
            try:
                self._launched_together(work, messages, mark)
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("coalesced messages", error)
            return work

        return end_coalescing

    def _launched_together(self, work: Any, messages: list[Message], mark: int | None) -> None:
        if not messages:
            return
        if work is None:
            self._timer.end(messages, mark)
            return
        newest = messages[-1]
        self.waits.works.add_newest(work, newest)
        self.waits.stream_ordered.add(newest.id)  # until its completion is observed
        if mark is None:
            for message in messages:
                self._reapers.follow(work, message, poll=True)
            return
        behind = self._timer.mark()
        self._timer.forget(mark)
        self._streams.follow(newest.group, work, messages, behind)

    def _is_timed_by_gloo(self, operator: Operator, launch: _Launch, message: Message) -> bool:
        """Whether Gloo's threads will record the times of a message on the CPU."""
        gloo = self.gloo
        if gloo is None:
            return False
        if not gloo.listens:
            gloo.listens = self._context.record.info.gloo_times = True
            self._context.save_info()
        if launch.slot < 0:
            return False
        return gloo.follow(launch.slot, message, waited_once=operator.waited_once)

    def _make_known(self, message: Message, group: Group, *, by_engine: bool) -> None:
        """Has messages like this one recorded without Python, if C++ launches it in each step."""
        known = self._known
        if known is None or not self._ddp.in_use or self._below.outer is not None:
            return
        if by_engine:
            self._ddp.make_known(known, message, group)
        elif message.op == "broadcast" and known.is_broadcasting():
            place = known.add(message, group)
            known.activate([] if place is None else [place])

    def _collect(self) -> None:
        """On the writer thread: reads the times that Gloo's threads recorded."""
        if self._known is not None:
            self._known.collect()
            self.waits.works.release_served()

    def _work(self, result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            result = result[-1] if result else None
        return None if result is None else self._unbox_work(result)

    def _completed(self, message: Message, end: int, clock: str, failed: bool) -> None:
        """Called when the end of a message was observed."""
        self.waits.stream_ordered.discard(message.id)
        seen = self.waits.seen_complete.pop(message.id, end)
        if seen < end:
            end, clock = seen, "wait"
        self._recorder.complete(message, end, clock, "failed" if failed else "ok")

    def _ended_on_device(
        self, message: Message, start: int, end: int, clock: str, failed: bool
    ) -> None:
        """Called when the device has ended a message."""
        if message.end_ns is None:
            message.start_ns = start
            self._completed(message, end, clock, failed)

    def _ordered(self, message: Message) -> None:
        """Called when the current stream has been made to wait for a message."""
        launch = self._streams.drop(message)
        if launch is not None:
            self._timer.start(message, launch.mark)
            self._timer.end_here(message)

    def _received(self, message: Message, work: Any) -> None:
        """Called when a receive is complete: its source is now known."""
        if message.peer is None:
            group = self._groups.named(message.group)
            try:
                message.peer = group.global_rank(work._source_rank())
            except RuntimeError:  # a handle in Python that does not provide it
                return
            message.seq = group.next_between(message.op, message.peer, message.tag)


def _stream_of(message: Message) -> Hashable:
    """Names the stream of the communication library in which a message runs."""
    return (message.group, message.peer) if message.op in P2P_OPS else message.group
