"""A strategy: one technique on each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddltrace.experiments.architectures.base import AnyArchitecture
from ddltrace.experiments.codecs.codec import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier
from ddltrace.experiments.frequency.frequency import Exchanged, Frequency
from ddltrace.experiments.optimizer_rules.optimizer_rule import OptimizerRule
from ddltrace.experiments.parallelism.descriptions import Fsdp, Parallelism
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.synchronization.rule import Place, Synchronization
from ddltrace.experiments.transports.transport import Transport


@dataclass(frozen=True)
class Strategy:
    """A composition along the axes; None on an axis is the axis's default.

    Attributes:
        spec: Its canonical spec, the inverse of `parse`.
        schedule: The order axis.
        codec: The volume axis.
        feedback: The modifier of the codec, such as error feedback.
        frequency: The frequency axis.
        optimizer_rule: The optimizer axis.
        parallelism: The parallelism axis.
        architecture: The architecture axis.
        synchronization: The synchronization axis.
        transport: The transport axis.
    """

    spec: str
    schedule: Schedule
    codec: CodecDescription | None = None
    feedback: Modifier | None = None
    frequency: Frequency | None = None
    optimizer_rule: OptimizerRule | None = None
    parallelism: Parallelism | None = None
    architecture: AnyArchitecture | None = None
    synchronization: Synchronization | None = None
    transport: Transport | None = None

    @property
    def runs_on_reducer(self) -> bool:
        """Whether PyTorch's own reducer executes it: DDP's buckets, and nothing else."""
        others = (self.frequency, self.optimizer_rule, self.architecture, self.synchronization)
        return (
            isinstance(self.schedule, DdpBuckets)
            and not self.encodes
            and others == (None,) * 4
            and self.transport is None
        )

    @property
    def encodes(self) -> bool:
        """Whether messages are encoded: by a codec, or by a modifier that chooses one itself."""
        return self.codec is not None or self.feedback is not None

    @property
    def cycle_steps(self) -> int:
        """Steps after which its exchanges repeat; 1 if all steps have the same."""
        parts = (self.frequency, self.synchronization)
        return math.lcm(*(part.cycle_steps for part in parts if part is not None))

    @property
    def opening_steps(self) -> int:
        """Steps at the start in which it does something else than from then on.

        It searches for parameters, calibrates itself, or has not begun, as ``postlocalsgd`` before
        its `start`. Schedules and codecs count exchanges, so the steps of a cycle count together.
        """
        exchanges = self.schedule.opening_steps
        if self.codec is not None:
            exchanges = max(exchanges, self.codec.opening_steps)
        alone = 0 if self.frequency is None else self.frequency.opening_steps
        return max(exchanges * self.cycle_steps, alone)

    @property
    def exchanges(self) -> Exchanged:
        """What its frequency technique exchanges."""
        return "gradients" if self.frequency is None else self.frequency.exchanges

    @property
    def changes_sharded_job(self) -> bool:
        """Whether it changes a job that calls ``fully_shard`` itself."""
        way = self.parallelism
        return isinstance(way, Fsdp) and (way != Fsdp() or self.frequency is not None)

    @property
    def place(self) -> Place:
        """Where its synchronization is carried out."""
        return "all" if self.synchronization is None else self.synchronization.place
