"""The parts of a recording rank that the patches work with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltrace.tracer.config import CaptureConfig
    from ddltrace.tracer.interpose.backward_pass import BackwardPass
    from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
    from ddltrace.tracer.interpose.c10d.groups import Groups
    from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages
    from ddltrace.tracer.interpose.cuda_graphs import CudaGraphs
    from ddltrace.tracer.interpose.patches import Patches
    from ddltrace.tracer.interpose.reducer_buckets import DdpBuckets
    from ddltrace.tracer.naming.registry import Registry
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.record.rank_record import RankRecord
    from ddltrace.tracer.record.recorder import Recorder
    from ddltrace.tracer.record.step_tracker import Steps
    from ddltrace.tracer.timing.device_use import DeviceUse


@dataclass(frozen=True)
class PatchContext:
    """The parts of a recording rank that the patches work with.

    Attributes:
        config: How to record.
        record: The trace's record of this process.
        recorder: The event buffer.
        registry: Names of modules and parameters.
        steps: Tracks the job's optimizer steps.
        backward: State of the current backward pass.
        device: Times device work, once the job is seen to use a device.
        groups: The process groups whose messages were seen.
        native: The native library; None if it is not available.
        gloo: The times that Gloo's threads record; None without `native`.
        known: The messages that C++ records without Python; None without `native`.
        ddp: The buckets of DistributedDataParallel.
        graphs: The messages of CUDA graphs.
        patches: What is replaced while the rank records.
        on_switch: Called when recording is switched on or off, with whether it is on.
        fault: Notes a failure inside the tracer; the job never sees it.
        on_close: Registers a function to call when the session closes, with a time limit in
            seconds.
        keep_alive: Holds an object until the process ends.
        write_now: Has the writer write all events, and waits for at most the given seconds.
    """

    config: CaptureConfig
    record: RankRecord
    recorder: Recorder
    registry: Registry
    steps: Steps
    backward: BackwardPass
    device: DeviceUse
    groups: Groups
    native: NativeLibrary | None
    gloo: GlooTimes | None
    known: KnownMessages | None
    ddp: DdpBuckets
    graphs: CudaGraphs
    patches: Patches
    on_switch: list[Callable[[bool], None]]
    fault: Callable[[str, Exception], None]
    on_close: Callable[[Callable[[float], object]], None]
    keep_alive: Callable[[object], None]
    write_now: Callable[[float], None]

    def save_info(self) -> None:
        """Requests a write of the record of this process, with all parameters known so far."""
        self.registry.changed = False
        self.record.save()

    @contextlib.contextmanager
    def carrying(self, name: str | None, tensors: Sequence[int | None]) -> Iterator[None]:
        """Declares which parameters the messages carry that this thread launches inside the
        context.

        Args:
            name: The messages' name; by default derived from the parameters' names.
            tensors: Ids; None for a parameter that is not registered.
        """
        former = None
        try:
            former = self.registry.carried.now
            self.registry.carried.now = self.registry.carry(name, tensors)
        except Exception as error:  # noqa: BLE001 - the job continues, its messages unnamed
            self.fault("carried", error)
        try:
            yield
        finally:
            self.registry.carried.now = former
