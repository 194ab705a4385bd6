"""Records single operators and device kernels in a window of steps, with PyTorch's profiler.

The profiler (Kineto) records everything, at a corresponding cost, so it runs for a few steps only.
Its events become rows of the trace like all others.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from ddltrace.tracer.interpose.cuda_graphs import GraphKernels
from ddltrace.tracer.interpose.flops import Formulas, count_flops, load_formulas
from ddltrace.tracer.timing.clocks import paired_reading
from ddltrace.tracer.timing.device_clock import stream_lane
from ddltrace.tracer.trace.communication_kernels import is_message_kernel

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_ROWS_AT_ONCE = 2000
_PAUSE_S = 0.02
_OPERATOR_LANES = 1 << 62  # above every thread's ident
_PROFILED_STREAMS = 1000  # the profiler numbers streams differently from `cuda.py`
_COPIES = ("Memcpy", "Memset")
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "hipGraphLaunch")


def open_window(context: PatchContext, first: int, stop: int) -> OperatorWindow:
    """Registers a window, which opens when the job's steps reach it.

    Args:
        context: The parts of the recording rank.
        first: The first step in it.
        stop: The step after the last.

    Returns:
        The window.
    """
    window = OperatorWindow(context, first, stop)
    window.load_formulas()
    context.steps.on_update.append(window.after_step)
    context.on_close(window.close)
    return window


class OperatorWindow:
    """Runs the profiler from the end of one step to the end of a later one."""

    def __init__(self, context: PatchContext, first: int, stop: int) -> None:
        self._context = context
        self._first, self._stop = first, stop
        self._profiler: Any = None
        self._folding: threading.Thread | None = None
        self._formulas: Formulas = {}

    def load_formulas(self) -> None:
        """Imports the formulas of floating-point operations, before the window opens."""
        try:
            self._formulas = load_formulas()
        except Exception as error:  # noqa: BLE001 - the job continues
            self._context.fault("flops", error)

    def after_step(self, number: int) -> None:
        """Opens or closes the window after a step.

        Args:
            number: Index of the step that ended.
        """
        try:
            following = number + 1
            if self._profiler is None and self._folding is None:
                if self._first <= following < self._stop:
                    self._start()
            elif self._profiler is not None and following >= self._stop:
                self._fold_in_background()
                self._context.steps.on_update.remove(self.after_step)
        except Exception as error:  # noqa: BLE001 - the job continues
            self._profiler = None
            self._context.fault("operators", error)

    def close(self, timeout_s: float) -> None:
        """Closes the window if it is still open, and waits for the rows."""
        if self._profiler is not None:
            self._fold_in_background()
        if self._folding is not None:
            self._folding.join(timeout_s)
            if self._folding.is_alive():
                self._context.fault("operators", TimeoutError("the profiler's rows are not all in"))

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return  # the job runs the profiler itself; try again after the next step
        activities = [ProfilerActivity.CPU]
        # Asking whether there is a device would initialize it: see `session.py`.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=bool(self._formulas))
        self._context.graphs.replays.clear()
        profiler.start()
        self._profiler = profiler

    def _fold_in_background(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        graphs = GraphKernels(list(self._context.graphs.replays))
        self._folding = threading.Thread(
            target=self._fold, args=(profiler, graphs), name="ddltrace-operators", daemon=True
        )
        self._folding.start()

    def _fold(self, profiler: Any, graphs: GraphKernels) -> None:
        """Turns the profiler's events into rows, a batch at a time."""
        try:
            recorder = self._context.recorder
            reading = paired_reading()
            # Kineto's times are on the wall clock.
            to_monotonic = reading["monotonic_ns"] - reading["unix_ns"]
            events = profiler.profiler.kineto_results.events()
            flops = self._flops(events)
            for count, event in enumerate(events):
                if event.is_async() or _is_hidden(event):
                    continue
                kind, lane = _kind_and_lane(event)
                start = event.start_ns() + to_monotonic
                end = start + event.duration_ns()
                if event.name() in _GRAPH_LAUNCHES:
                    graphs.add_launch(start, event.correlation_id())
                elif kind is None and not event.is_user_annotation():
                    graphs.add_kernel(start, end, event.correlation_id())
                if kind is None:
                    continue
                site = recorder.site(kind, event.name(), flops=flops.get(count, -1))
                recorder.add(site, start, end, lane)
                if count % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
                    time.sleep(_PAUSE_S)  # leave the interpreter lock to the job's threads
            # A second row of a message replaces the first.
            recorder.finished.extend(graphs.timed())
        except Exception as error:  # noqa: BLE001 - the job continues
            self._context.fault("operators", error)

    def _flops(self, events: list[Any]) -> dict[int, int]:
        """Place of an event -> its floating-point operations; empty if their sum is not known."""
        # The operators of a graph's replay are not recorded.
        if any(event.name() in _GRAPH_LAUNCHES for event in events):
            return {}
        try:
            return count_flops(events, self._formulas)
        except Exception as error:  # noqa: BLE001 - the rows are recorded without them
            self._context.fault("flops", error)
            return {}


def _kind_and_lane(event: Any) -> tuple[str | None, int]:
    """Kind and lane of one of the profiler's events; kind None leaves the event out."""
    on_device = "CPU" not in str(event.device_type())
    if not on_device:
        # Separate lanes: the two clocks differ by some hundred nanoseconds, and rows of one lane
        # must nest.
        return "host", _OPERATOR_LANES + int(event.start_thread_id())
    name = event.name()
    if _communicates(name):
        return None, 0  # recorded as messages
    if event.is_user_annotation():
        return None, 0  # device ranges of the host's markers: they include idle time
    kind = "copy" if name.startswith(_COPIES) else "kernel"
    return kind, stream_lane(_PROFILED_STREAMS + event.device_resource_id())


_communicates = functools.cache(is_message_kernel)  # a window has few names and many kernels


def _is_hidden(event: Any) -> bool:
    # PyTorch 2.6 hides no events.
    ask = getattr(event, "is_hidden_event", None)
    return ask is not None and bool(ask())
