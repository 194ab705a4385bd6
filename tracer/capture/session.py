"""One recording rank: from joining the process group to the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.capture.fault_barrier import quiet
from ddltrace.tracer.capture.overhead_probe import CostMeter
from ddltrace.tracer.capture.steps import Steps
from ddltrace.tracer.config import CaptureConfig
from ddltrace.tracer.interpose.autograd import Backward
from ddltrace.tracer.interpose.c10d.groups import Groups
from ddltrace.tracer.naming.registry import Registry
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.record.tail import TailWriter
from ddltrace.tracer.record.watchdog import Watchdog
from ddltrace.tracer.record.writer import WriterThread
from ddltrace.tracer.timing.clocks import clock_domain, paired_reading
from ddltrace.tracer.trace.json_files import release_space, reserve_space
from ddltrace.tracer.trace.liveness import pid_namespace
from ddltrace.tracer.trace.run_files import write_sidecar
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo
from ddltrace.tracer.trace.stream_writer import StreamWriter
from ddltrace.tracer.trace.trace_files import (
    SIDECAR_SUFFIX,
    STREAM_SUFFIX,
    TAIL_SUFFIX,
    segment_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
    from ddltrace.tracer.interpose.c10d.waits import Waits
    from ddltrace.tracer.interpose.ddp import DdpBuckets
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.timing.device_clock import DeviceTimer

_MAX_FAULTS: Final = 20
_BEYOND_PIDS: Final = 10_000_000
_CLOSE_TIMEOUT_S: Final = 5.0
_TELL_DROPPED_S: Final = 1.0

_current: Session | None = None
_starting: Final = threading.Lock()


def current_session() -> Session | None:
    """The session of this process, if it is a recording rank."""
    return _current


def start_session(config: CaptureConfig) -> None:
    """Begins to record; whatever goes wrong, the job goes on untraced."""
    global _current  # noqa: PLW0603 - one process is one rank
    # Never waited for: a process can be forked while another thread starts.
    if _current is not None or not _starting.acquire(blocking=False):
        return
    session = None
    try:
        if _current is None:
            session = Session(config)
            session.start()
            _current = session
    except Exception as error:  # noqa: BLE001 - see above
        config.leave_word(error)
        if session is not None:
            session.close()
    finally:
        _starting.release()


def _identity() -> tuple[int, int, str]:
    """This process's rank, the number of ranks, and what they communicate by."""
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()
    from torch.distributed import rpc

    bindings: Any = rpc
    agent = bindings.api._get_current_rpc_agent()
    return agent.get_worker_info().id, len(agent.get_worker_infos()), "rpc"


class Session:
    """What one rank process records with, and its life.

    Attributes:
        config: How to record.
        recorder: The event buffer.
        registry: Names of modules and parameters.
        steps: Where one optimizer step ends and the next begins.
        backward: The backward pass that runs.
        device: Times device work, once the job is known to use a device.
        groups: The process groups that messages were seen in.
        waits: Where the host's waits are recorded.
        native: What records without Python, where that can be.
        known: The messages that it records.
        ddp: The buckets of DistributedDataParallel, once a model is wrapped in it.
        info: What the trace says of this process.
    """

    def __init__(self, config: CaptureConfig) -> None:
        import torch

        self.config = config
        self.recorder = Recorder(config.buffer_rows)
        self.registry = Registry(self.recorder)
        rank, world_size, backend = _identity()
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        local_rank = os.environ.get("LOCAL_RANK")
        self.info = RankInfo(
            rank=rank,
            segment=segment_name(rank=rank, attempt=attempt, pid=os.getpid()),
            world_size=world_size,
            local_rank=int(local_rank) if local_rank and local_rank.isdigit() else None,
            attempt=attempt,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            host=platform.node(),
            clock_domain=clock_domain(),
            level=config.level,
            backend=backend,
            # Whether there is a device is not asked: the answer initializes the driver, and
            # children that the job forks later could not use it. The first use tells.
            device="cpu",
            versions={"torch": torch.__version__, "python": platform.python_version()},
            clock=paired_reading(),
        )
        self.steps = Steps(self.recorder)
        self.backward = Backward()
        self.groups = Groups(self)
        self.waits: Waits | None = None
        self.native: NativeLibrary | None = None
        self.known: KnownMessages | None = None
        self.ddp: DdpBuckets | None = None
        self.device: DeviceTimer | None = None
        self.device_failed = False
        self._meter: CostMeter | None = None
        self._kept_alive: list[object] = []
        self._pid = os.getpid()
        self._closed = False
        self._changed = False
        self._told_dropped_s = 0.0
        self._stream: StreamWriter | None = None
        self._tail: TailWriter | None = None
        self._writer: WriterThread | None = None
        self._stoppers: list[Callable[[float], object]] = []

    def start(self) -> None:
        """Opens the stream, patches, and starts the writer."""
        from ddltrace.tracer import interpose
        from ddltrace.tracer.timing import clock_exchange

        directory = self.config.directory
        self.config.prepare_directory()
        self._name_segment(directory)
        self._stream = StreamWriter(directory / (self.info.segment + STREAM_SUFFIX))
        self._tail = TailWriter(directory / (self.info.segment + TAIL_SUFFIX), self.recorder)
        write_sidecar(directory, self.info)
        reserve_space(directory / (self.info.segment + SIDECAR_SUFFIX))
        self._writer = WriterThread(
            self.recorder,
            self._stream,
            self._tail,
            self.config.flush_interval_s,
            on_fault=self.fault,
            on_beat=self._save_changes,
            on_end=self._finish,
            watchdog=Watchdog(
                self.recorder, self.note_silence, lambda: self.registry.access.trainer
            ),
        )
        self._writer.start()
        os.register_at_fork(
            before=quiet(self._writer.pause, self.fault),
            after_in_parent=quiet(self._writer.resume, self.fault),
            after_in_child=quiet(self._abandon, self.fault),
        )
        close = quiet(self.close, self.fault)
        atexit.register(close)
        # Processes started by multiprocessing leave without running atexit.
        multiprocessing.util.Finalize(None, close, exitpriority=0)
        if self.config.measure_cost:
            self._meter = CostMeter(self.recorder, self.config.measure_cost)
            self.steps.on_update.append(self._meter.after_step)
        interpose.install(self)
        stop_exchange = clock_exchange.start(self.info, self.save_info, self.fault)
        if stop_exchange is not None:
            self.on_close(stop_exchange)

    def _name_segment(self, directory: Path) -> None:
        """Finds a name of its own for the files of a process that is not the first of its pid.

        A rank that replaced itself by `exec` keeps its pid; a container's restart repeats it.
        """
        pid = os.getpid()
        while (directory / (self.info.segment + SIDECAR_SUFFIX)).exists():
            pid += _BEYOND_PIDS
            self.info.segment = segment_name(
                rank=self.info.rank, attempt=self.info.attempt, pid=pid
            )

    @contextlib.contextmanager
    def carrying(self, name: str | None, tensors: Sequence[int | None]) -> Iterator[None]:
        """Says which parameters the messages that this thread begins inside are about.

        Args:
            name: The messages' name; by default after the parameters.
            tensors: Ids; None for a parameter that is not registered.
        """
        former = None
        try:
            former = self.registry.carried.now
            self.registry.carried.now = self.registry.carry(name, tensors)
        except Exception as error:  # noqa: BLE001 - the job goes on, its messages unnamed
            self.fault("carried", error)
        try:
            yield
        finally:
            self.registry.carried.now = former

    def on_close(self, stop: Callable[[float], object]) -> None:
        """Has something stopped when the session closes, given the seconds that it may take."""
        self._stoppers.append(stop)

    def keep_alive(self, thing: object) -> None:
        """Holds on to something until the process ends."""
        self._kept_alive.append(thing)

    def add_group(self, group: GroupInfo) -> None:
        """Notes a process group when its first message is seen."""
        self.info.groups.append(group)
        self.save_info()

    def save_info(self) -> None:
        """Has the trace's picture of this process brought up to date.

        By the writer, at its next beat: a disk that does not answer must not stop the job.
        """
        self.registry.changed = False
        self._changed = True

    def _save_changes(self) -> None:
        """On the writer's thread: saves what has changed, and how much was dropped till now."""
        now_s = time.monotonic()
        # A rank that is killed cannot tell of it any more.
        tells = self.recorder.dropped != self.info.dropped and (
            now_s > self._told_dropped_s + _TELL_DROPPED_S
        )
        if not self._changed and not tells:
            return
        self._changed = False
        self._told_dropped_s = now_s
        self._write_info()

    def _write_info(self) -> None:
        self.info.tensors = list(self.registry.tensors)
        self.info.dropped = self.recorder.dropped
        try:
            write_sidecar(self.config.directory, self.info)
        except OSError as error:
            self._note(f"save_info: {error!r:.200}")
        except RuntimeError:  # another thread has just added to it
            self._changed = True

    def note_device(self, timer: DeviceTimer) -> None:
        """Takes up the timing of the device that the job was seen to use."""
        self.device = timer
        self.info.device = "cuda"
        self.save_info()

    def note_silence(self, silence: dict[str, Any]) -> None:
        """Takes down what this rank does while it records nothing."""
        self.info.silence = silence
        self.save_info()

    def fault(self, where: str, error: Exception) -> None:
        """Takes note of a failure inside the tracer; the job never hears of it."""
        if len(self.info.errors) >= _MAX_FAULTS:
            return
        with contextlib.suppress(Exception):
            self._note(f"{where}: {type(error).__name__}: {str(error)[:200]}")
            self.save_info()

    def close(self) -> None:
        """Writes what is left and marks the trace of this rank as complete. Idempotent."""
        if self._closed or os.getpid() != self._pid or self._writer is None:
            return
        self._closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        last_steps = (lambda _: self.steps.close(), *self._stoppers)
        for stop in last_steps:
            # One that fails must not cost the others, and least of all the last write.
            try:
                stop(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the process is on its way out
                self.fault("close", error)
        if self.registry.unnamed:
            self._note(f"registry: {self.registry.unnamed} parameters too many to be named")
        with contextlib.suppress(Exception):
            self.info.cost = self._meter.result() if self._meter else None
        self.info.clock["writer_busy_ns"] = self._writer.busy_ns
        if self._writer.is_alive():
            self._writer.stop(max(1.0, deadline - time.monotonic()))
        else:
            self._finish(self._writer.rows)  # its start has failed, or a fault has ended it

    def _finish(self, rows: int) -> None:
        """Ends the stream and tells so: on the writer's thread, after the last write."""
        try:
            if self._stream is not None:
                self._stream.close()
            self.info.status = "complete"
        except Exception as error:  # noqa: BLE001 - the process is on its way out
            self.fault("close", error)
        self.info.events = rows
        self._changed = True
        while self._changed:
            self._changed = False
            self._write_info()
        release_space(self.config.directory / (self.info.segment + SIDECAR_SUFFIX))

    def _note(self, text: str) -> None:
        if len(self.info.errors) < _MAX_FAULTS:
            self.info.errors.append(text)

    def _abandon(self) -> None:
        """In a forked child: the trace stays the parent's."""
        global _current  # noqa: PLW0603
        _current = None
        self._closed = True
        self.recorder.close_after_fork()
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.abandon()
        if self._tail is not None:
            with contextlib.suppress(OSError):
                self._tail.close()
