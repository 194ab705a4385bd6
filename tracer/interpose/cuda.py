"""Times the device work of a CUDA device, with events on the job's own streams.

Each process times one device: the first that a model or message uses. Work on other devices gets no
device times, rather than wrong ones.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.record.recorder import Message
from ddltrace.tracer.timing.cuda_events import CudaRuntime
from ddltrace.tracer.timing.device_clock import DeviceClock, DeviceTimer
from ddltrace.tracer.timing.device_marks import DeviceMarks
from ddltrace.tracer.timing.device_use import ResolverThread

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.interpose.patch_context import PatchContext

_CAPTURE_MODE_THREAD_LOCAL: Final = 1  # cudaStreamCaptureModeThreadLocal
_UNUSUAL_PRIORITY: Final = -2  # jobs have 0 and -1, process groups -1 or the highest, -3


def time_device_of(context: PatchContext, tensors: Iterable[torch.Tensor]) -> None:
    """Starts to time device work at the job's first use of a device.

    Args:
        context: The parts of the recording rank.
        tensors: Tensors with which the job is about to compute or communicate.
    """
    import torch

    cuda: Any = torch.cuda
    if context.device.timer is not None or context.device.failed or not cuda.is_initialized():
        return
    for tensor in tensors:
        if tensor.is_cuda:
            _start(context, tensor.device.index)
            return


class MessageTimer:
    """Times when the device reaches the messages that are launched into its streams.

    Args:
        context: The parts of the recording rank.
    """

    def __init__(self, context: PatchContext) -> None:
        import torch

        self._context = context
        self._cuda: Any = torch.cuda

    def in_use(self) -> bool:
        """Whether the job uses a device; if not, the other methods need not be called."""
        return bool(self._cuda.is_initialized())

    def is_capturing(self) -> bool:
        """Whether launches become part of a graph instead of running."""
        return bool(self._cuda.is_current_stream_capturing())

    def times(self, tensor: torch.Tensor) -> bool:
        """Whether work on a tensor's device is timed, from now on or already."""
        context = self._context
        time_device_of(context, [tensor])
        timer = context.device.timer
        return timer is not None and tensor.device.index == timer.device

    def passed_ns(self, mark: int) -> int | None:
        """When the device passed a mark, which this consumes; None if that is not known."""
        timer = self._context.device.timer
        try:
            return None if timer is None else timer.passed_ns(mark)
        except Exception as error:  # noqa: BLE001 - the job continues without device times
            self._context.fault("message arrival", error)
            return None

    def mark(self, *, free: bool = False) -> int | None:
        """Marks the current stream; None if no device is timed or the stream is captured.

        Args:
            free: Whether the stream is known not to be captured.
        """
        timer = self._context.device.timer
        return None if timer is None else timer.mark(free=free)

    def forget(self, mark: int | None) -> None:
        """Consumes a mark that is not needed."""
        timer = self._context.device.timer
        if timer is not None and mark is not None:
            timer.forget(mark)

    def start(self, message: Message, mark: int | None) -> None:
        """Sets the start of a message to its mark; its end is recorded elsewhere."""
        if mark is None:
            return

        def settle(message: Message) -> None:
            arrival = self.passed_ns(mark)
            if arrival is not None and message.end_ns is not None:
                message.start_ns = min(max(arrival, message.enqueue_ns), message.end_ns)

        message.settle = settle

    def end_here(self, message: Message) -> None:
        """Ends a message where the current stream, which waits for it, continues; no earlier."""
        self._end([message], self.mark(), begins=False)

    def end(self, messages: Sequence[Message], mark: int | None) -> None:
        """Ends what was launched as one in the current stream, as synchronous NCCL messages are."""
        self._end(messages, mark, begins=True)

    def _end(self, messages: Sequence[Message], mark: int | None, *, begins: bool) -> None:
        timer, recorder = self._context.device.timer, self._context.recorder

        def passed(start_ns: int, end_ns: int) -> None:
            clock = "device" if start_ns else "host"  # see `DeviceTimer.abandon`
            for message in messages:
                if begins:
                    message.start_ns = max(start_ns, message.enqueue_ns)
                recorder.complete(message, max(end_ns, message.start_ns), clock)

        if timer is None or not timer.interval(passed, mark):
            # Nothing else records their end. Left open, the messages would look like a hang.
            for message in messages:
                recorder.complete(message, time.monotonic_ns(), "host")


def is_timed(
    timer: DeviceTimer | DeviceMarks, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call computes on the timed device: whether its first tensor argument is there."""
    first: Any = args[0] if args else next(iter(kwargs.values()), None)
    return getattr(first, "is_cuda", False) is True and bool(first.device.index == timer.device)


def prepare_thread(device: int) -> None:
    """Prepares a thread of the tracer for querying events.

    A new thread starts on device 0, where its first call would create a context that the job does
    not want. And querying an event while another thread captures a graph would make that capture
    fail, unless the querying thread has the thread-local capture mode.

    Args:
        device: The device whose events are queried.

    Raises:
        OSError: The CUDA runtime cannot be called.
    """
    import torch

    torch.cuda.set_device(device)
    mode = ctypes.c_int(_CAPTURE_MODE_THREAD_LOCAL)
    try:
        status = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except AttributeError:  # torch has no shared runtime library; the driver has the same function
        driver = ctypes.CDLL("libcuda.so.1")
        status = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise OSError(f"the mode of stream captures cannot be set: CUDA error {status}")


def asking_from_any_thread(
    context: PatchContext, ask: Callable[[Any], bool]
) -> Callable[[Any], bool]:
    """Wraps ``Work.is_completed`` for threads of the tracer.

    Args:
        context: The parts of the recording rank.
        ask: The original method.
    """
    prepared = threading.local()

    def is_completed(work: Any) -> bool:
        timer = context.device.timer
        if timer is not None and not hasattr(prepared, "done"):
            prepared.done = True
            try:
                prepare_thread(timer.device)
            except Exception as error:  # noqa: BLE001 - it matters to captures only
                context.fault("stream captures", error)
        return ask(work)

    return is_completed


def _start(context: PatchContext, device: int) -> None:
    import torch

    try:
        runtime = CudaRuntime()
    except (OSError, AttributeError) as error:
        context.device.fail()
        context.fault("device clock", error)
        return
    # PyTorch takes streams from pools, one for each priority, in turn: a stream of a common
    # priority would soon be used by the job as well.
    idle = torch.cuda.Stream(device, priority=_UNUSUAL_PRIORITY)  # type: ignore[no-untyped-call]
    clock = DeviceClock(runtime.new_event, lambda event: event.record(idle.cuda_stream))

    def prepare() -> None:
        try:
            prepare_thread(device)
        except OSError as error:
            context.fault("stream captures", error)

    def fail(where: str, error: Exception) -> None:
        context.device.fail()
        context.fault(where, error)

    timer = _timer(context, runtime, clock, device)
    resolver = ResolverThread(timer, fail, prepare, context.device.tasks)
    resolver.start()
    context.keep_alive(idle)
    context.on_close(resolver.stop)
    context.on_close(lambda _: context.record.info.clock.update(device_error_ns=clock.max_error_ns))
    # A child cannot use the device.
    os.register_at_fork(after_in_child=quiet(context.device.forget, context.fault))
    context.device.start(timer)


def _timer(
    context: PatchContext, runtime: CudaRuntime, clock: DeviceClock, device: int
) -> DeviceTimer | DeviceMarks:
    """The timer in C++, or the one in Python if the library cannot be used."""
    if context.native is not None:
        try:
            functions = runtime.functions()
            marks = DeviceMarks(context.native, functions, context.recorder, clock, device)
            os.register_at_fork(after_in_child=marks.stop)
            return marks
        except (OSError, AttributeError) as error:
            context.fault("device marks in C++", error)
    numbers: dict[int, int] = {}
    next_number = itertools.count().__next__

    def current_stream() -> tuple[int, int]:
        stream = runtime.current_stream(device)
        number = numbers.get(stream)
        if number is None:
            number = numbers.setdefault(stream, next_number())
        return stream, number

    return DeviceTimer(
        context.recorder,
        clock,
        runtime.new_event,
        current_stream,
        device=device,
        is_capturing=runtime.is_capturing,
        is_current=lambda: runtime.current_device() == device,
    )
