"""One recording rank: from joining the process group to the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.capture import launcher_links
from ddltrace.tracer.capture.control import Control
from ddltrace.tracer.capture.frameworks import framework_versions
from ddltrace.tracer.capture.overhead_probe import CostMeter
from ddltrace.tracer.capture.process_role import process_role
from ddltrace.tracer.capture.recording_switch import RecordingSwitch
from ddltrace.tracer.capture.triggers import Triggers
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.connections.job_store import meeting_address
from ddltrace.tracer.connections.proof import refused
from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.interpose.backward_pass import BackwardPass
from ddltrace.tracer.interpose.c10d import gloo_threads
from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
from ddltrace.tracer.interpose.c10d.groups import Groups
from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
from ddltrace.tracer.interpose.cuda_graphs import CudaGraphs
from ddltrace.tracer.interpose.device_memory import DeviceMemory
from ddltrace.tracer.interpose.install import install
from ddltrace.tracer.interpose.patch_context import PatchContext
from ddltrace.tracer.interpose.patches import Patches
from ddltrace.tracer.interpose.reducer_buckets import DdpBuckets
from ddltrace.tracer.naming.gradient_ready_times import NativeGradients
from ddltrace.tracer.naming.ready_gradients import ReadyGradients
from ddltrace.tracer.naming.registry import Registry
from ddltrace.tracer.native import build
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.record.rank_record import RankRecord
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.record.step_tracker import Steps
from ddltrace.tracer.record.watchdog import Watchdog
from ddltrace.tracer.record.writer import WriterThread
from ddltrace.tracer.resources.counter_thread import CounterThread
from ddltrace.tracer.resources.step_processor_time import StepProcessorTime
from ddltrace.tracer.timing import clock_exchange
from ddltrace.tracer.timing.clocks import clock_domain, paired_reading
from ddltrace.tracer.timing.device_use import DeviceUse
from ddltrace.tracer.trace.liveness import pid_namespace
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import (
    SIDECAR_SUFFIX,
    STREAM_SUFFIX,
    counters_name,
    segment_name,
)
from ddltrace.tracer.trigger_expression import parse_trigger

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.waits import Waits

_BEYOND_PIDS: Final = 10_000_000
_CLOSE_TIMEOUT_S: Final = 5.0
_GLOO_TIMEOUT_S: Final = 2.0

_current: Session | None = None
_starting: Final = threading.Lock()


def current_session() -> Session | None:
    """The session of this process, if it is a recording rank."""
    return _current


def start_session(config: CaptureConfig) -> None:
    """Starts recording; on any error, the job continues untraced."""
    global _current  # noqa: PLW0603 - one process is one rank
    # Never waited for: a process can be forked while another thread starts.
    if _current is not None or not _starting.acquire(blocking=False):
        return
    session = None
    try:
        if _current is None:
            # Registered first, so it runs last: functions that run before can still drop tensors
            # that Gloo works on. A session that cannot start leaves the job protected as well.
            atexit.register(quiet(gloo_threads.wait_until_idle, lambda *_: None), _GLOO_TIMEOUT_S)
            session = _session(config)
            session.start()
            _current = session
    except Exception as error:  # noqa: BLE001 - see above
        config.report_failure(error)
        if session is not None:
            session.close()
    finally:
        _starting.release()


class Session:
    """The life of a recording rank.

    Args:
        context: The parts that the patches work with.
        stream: Where batches of events go.
        writer: Writes the batches.
        counters: Records resource counters; None if they are turned off.
        control: Takes orders to switch recording; None if it cannot.
        meter: Measures the overhead of recording; None if this was not requested.
        stoppers: Functions that are called when the session closes, with their time limit in
            seconds; patches add to them.
        kept_alive: Objects that must exist until the process ends; patches add to it.
    """

    def __init__(
        self,
        context: PatchContext,
        stream: StreamWriter,
        writer: WriterThread,
        counters: CounterThread | None,
        control: Control | None,
        *,
        meter: CostMeter | None,
        stoppers: Sequence[Callable[[float], object]],
        kept_alive: Sequence[object],
    ) -> None:
        self.context = context
        self.config = context.config
        self.recorder = context.recorder
        self.registry = context.registry
        self.known = context.known
        self.waits: Waits | None = None
        self._record = context.record
        self._stream = stream
        self._writer = writer
        self._counters = counters
        self._control = control
        self._meter = meter
        self._stoppers = stoppers
        self._kept_alive = kept_alive
        self._pid = os.getpid()
        self._opened = False
        self._closed = False

    def start(self) -> None:
        """Starts the writer and patches."""
        context, fault = self.context, self._record.fault
        self._record.open()
        self._opened = True
        self._writer.start()
        os.register_at_fork(
            before=quiet(self._writer.pause, fault),
            after_in_parent=quiet(self._writer.resume, fault),
            after_in_child=quiet(self._abandon, fault),
        )
        if self._counters is not None:
            self._start_counters(self._counters)
        if self._control is not None:
            self._control.start()
            os.register_at_fork(after_in_child=quiet(self._control.close_after_fork, fault))
            self._start_triggers(self._control)
            unlink = launcher_links.start(self._record.info, self._control, fault)
            if unlink is not None:
                context.on_close(unlink)
        close = quiet(self.close, fault)
        atexit.register(close)
        # Processes started by multiprocessing leave without running atexit.
        multiprocessing.util.Finalize(None, close, exitpriority=0)
        if self._meter is not None:
            context.steps.on_update.append(self._meter.after_step)
        self.waits = install(context)
        stop_exchange = clock_exchange.start(self._record.info, context.save_info, fault)
        if stop_exchange is not None:
            context.on_close(stop_exchange)

    def _start_triggers(self, control: Control) -> None:
        parsed = [parse_trigger(text) for text in self.config.triggers]
        if any(trigger.late_ms is not None for trigger in parsed):
            self._writer.on_batch = quiet(control.times.add, self.fault)
        if parsed and self._record.info.rank == 0:
            triggers = Triggers(parsed, control.carry_out, control.ask_job, self.fault)
            control.switch.watch(triggers.after_step)
            triggers.start()
            self.context.on_close(triggers.stop)

    def _start_counters(self, counters: CounterThread) -> None:
        """Starts recording resource counters; on an error, the rank records events only."""
        fault = self._record.fault
        try:
            counters.start()
            os.register_at_fork(
                before=quiet(counters.pause, fault),
                after_in_parent=quiet(counters.resume, fault),
                after_in_child=quiet(counters.abandon, fault),
            )
            self.context.on_switch.append(lambda _: counters.wake_up())
            memory = DeviceMemory(self.context, counters)
            processor_time = StepProcessorTime(counters)
            self.context.steps.on_update += [memory.after_step, processor_time.after_step]
        except Exception as error:  # noqa: BLE001 - see above
            self.fault("counters", error)

    def fault(self, where: str, error: Exception) -> None:
        """Notes a failure inside the tracer; the job never sees it."""
        self._record.fault(where, error)

    def close(self) -> None:
        """Writes the remaining events and marks the trace of this rank as complete. Idempotent."""
        if self._closed or not self._opened or os.getpid() != self._pid:
            return
        self._closed = True
        if self._control is not None:
            self._control.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        last_steps = (lambda _: self.context.steps.close(), *self._stoppers)
        for stop in last_steps:
            # A failing function must not prevent the others, in particular the last write.
            try:
                stop(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the process is on its way out
                self.fault("close", error)
        if self.registry.unnamed:
            self._record.note(
                f"registry: {counted(self.registry.unnamed, 'parameter')} too many to be named"
            )
        info = self._record.info
        with contextlib.suppress(Exception):
            info.cost = self._meter.result() if self._meter else None
        with contextlib.suppress(Exception):
            info.versions.update(framework_versions())
        info.refused_connections = refused.count
        info.clock["writer_busy_ns"] = self._writer.busy_ns
        if self._counters is not None:
            with contextlib.suppress(Exception):
                self._counters.stop(max(0.5, deadline - time.monotonic()))
            info.clock["counters_busy_ns"] = self._counters.busy_ns
            info.counters_dropped = self._counters.dropped
        if self._writer.is_alive():
            self._writer.stop(max(1.0, deadline - time.monotonic()))
        else:  # its start has failed, or a fault has ended it
            _finish(self._record, self._stream, self._writer.rows)

    def _abandon(self) -> None:
        """In a forked child: stops recording, because the trace belongs to the parent."""
        global _current  # noqa: PLW0603
        _current = None
        self._closed = True
        self.recorder.close_after_fork()
        with contextlib.suppress(OSError):
            self._stream.abandon()


def _session(config: CaptureConfig) -> Session:
    """Creates a session and all its parts, and opens its stream.

    Raises:
        OSError: The stream cannot be opened.
    """
    config.prepare_directory()
    recorder = Recorder(config.buffer_rows, detailed=config.level != "comm")
    info = _rank_info(config)
    ready = ReadyGradients()
    faults: list[tuple[str, Exception]] = []

    def note(part: str, error: Exception) -> None:
        faults.append((part, error))  # until there is a record

    native: NativeLibrary | None = None
    try:
        # Loaded at the start, because the job's threads must not read the disk later.
        native = NativeLibrary(build.find())
    except Exception as reason:  # noqa: BLE001 - all can be recorded in Python
        info.native_missing = str(reason)
    gloo, known, gradients = None, None, None
    if native is not None:
        gloo = _or_none("Gloo's times", lambda: GlooTimes(native, recorder), note)
        gradients = _or_none("gradients", lambda: NativeGradients(native, recorder, ready), note)
    if native is not None and gloo is not None:
        known = _or_none("known messages", lambda: KnownMessages(native, gloo, recorder), note)
    registry = Registry(recorder, ready, gradients)
    record = RankRecord(info, config.directory, registry.tensors, recorder)
    for where, error in faults:
        record.fault(where, error)
    groups = Groups(functools.partial(_add_group, record, known))
    backward = BackwardPass()
    ddp = DdpBuckets(registry, groups, backward, known)
    stream = StreamWriter(config.directory / (info.segment + STREAM_SUFFIX))
    writer = WriterThread(
        recorder,
        stream,
        config.flush_interval_s,
        on_fault=record.fault,
        on_beat=record.save_changes,
        on_end=functools.partial(_finish, record, stream),
        watchdog=Watchdog(recorder, record.note_silence, lambda: registry.access.trainer),
    )
    stoppers: list[Callable[[float], object]] = []
    kept_alive: list[object] = []
    context = PatchContext(
        config=config,
        record=record,
        recorder=recorder,
        registry=registry,
        steps=Steps(recorder),
        backward=backward,
        device=DeviceUse(record.note_device),
        groups=groups,
        native=native,
        gloo=gloo,
        known=known,
        ddp=ddp,
        graphs=CudaGraphs(recorder, record.fault),
        patches=Patches(),
        on_switch=[],
        fault=record.fault,
        on_close=stoppers.append,
        keep_alive=kept_alive.append,
        write_now=writer.write_now,
    )
    switch = RecordingSwitch(context, begin_off=config.off, wake_writer=writer.ask)
    control = None
    with contextlib.suppress(OSError):  # nobody can give it orders then, and nothing is lost
        control = Control(info, config.directory, switch, config.level, record.fault)
    meter = CostMeter(recorder, config.measure_cost) if config.measure_cost else None
    counters = None
    if config.counters:
        counters = _or_none(
            "counters", lambda: _counters(config, info, recorder, record), record.fault
        )
    return Session(
        context,
        stream,
        writer,
        counters,
        control,
        meter=meter,
        stoppers=stoppers,
        kept_alive=kept_alive,
    )


def _counters(
    config: CaptureConfig, info: RankInfo, recorder: Recorder, record: RankRecord
) -> CounterThread:
    """The thread that records resource counters."""
    return CounterThread(
        config.directory / (counters_name(info.segment) + STREAM_SUFFIX),
        # If the launcher does not number the ranks of a host, each reads the host's counters.
        whole_host=not info.local_rank,
        step=lambda: recorder.step,
        rests=recorder.rests,
        on_fault=record.fault,
    )


def _or_none(part: str, make: Callable[[], Any], on_fault: Callable[[str, Exception], None]) -> Any:
    """Creates an optional part; on an error, notes a fault and returns None."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - see above
        on_fault(part, error)
        return None


def _rank_info(config: CaptureConfig) -> RankInfo:
    import torch
    import torch.distributed as dist

    rank, world_size, backend = _identity()
    local_rank = os.environ.get("LOCAL_RANK")
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankInfo(
        rank=rank,
        segment=_own_segment_name(config, rank, attempt),
        world_size=world_size,
        role=process_role(),
        store=meeting_address(dist.group.WORLD),
        local_rank=int(local_rank) if local_rank and local_rank.isdigit() else None,
        attempt=attempt,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        host=platform.node(),
        clock_domain=clock_domain(),
        level=config.level,
        backend=backend,
        # Asking whether there is a device would initialize the driver, and children that the job
        # forks later could not use it. The job's first use of the device shows it.
        device="cpu",
        versions={"torch": torch.__version__, "python": platform.python_version()},
        clock=paired_reading(),
    )


def _identity() -> tuple[int, int, str]:
    """This process's rank, the number of ranks, and the backend of their communication."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()
    from torch.distributed import rpc

    bindings: Any = rpc
    agent = bindings.api._get_current_rpc_agent()
    return agent.get_worker_info().id, len(agent.get_worker_infos()), "rpc"


def _own_segment_name(config: CaptureConfig, rank: int, attempt: int) -> str:
    """A name for this process's files that no other process of the trace has.

    A rank that replaced itself by `exec` keeps its pid; a container's restart repeats it.
    """
    pid = os.getpid()
    segment = segment_name(rank=rank, attempt=attempt, pid=pid)
    while (config.directory / (segment + SIDECAR_SUFFIX)).exists():
        pid += _BEYOND_PIDS
        segment = segment_name(rank=rank, attempt=attempt, pid=pid)
    return segment


def _add_group(record: RankRecord, known: KnownMessages | None, group: GroupInfo) -> None:
    """Notes a process group when its first message is seen or its description changes."""
    if known is not None:
        # The new group may have the address of a deleted one.
        known.forget()
    record.add_group(group)


def _finish(record: RankRecord, stream: StreamWriter, rows: int) -> None:
    """Ends the stream and marks it as complete: on the writer's thread, after the last write.

    Args:
        record: The record of this process.
        stream: The stream of events.
        rows: Number of written events.
    """
    try:
        stream.close()
        record.info.status = "complete"
    except Exception as error:  # noqa: BLE001 - the process is on its way out
        record.fault("close", error)
    record.finish(rows)
