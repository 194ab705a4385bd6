"""A strategy: one technique on each axis."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ddltrace.experiments.schedules.base import Schedule


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
    codec: Any = None
    feedback: Any = None
    frequency: Any = None
    optimizer_rule: Any = None
    parallelism: Any = None
    architecture: Any = None
    synchronization: Any = None
    transport: Any = None

    @property
    def encodes(self) -> bool:
        """Whether messages are encoded: by a codec, or by a modifier that chooses one itself."""
        return self.codec is not None or self.feedback is not None

    @property
    def cycle_steps(self) -> int:
        """Steps after which its exchanges repeat; 1 if all steps have the same."""
        parts = (self.frequency, self.synchronization)
        return math.lcm(*(getattr(part, "cycle_steps", 1) for part in parts))

    @property
    def opening_steps(self) -> int:
        """Steps at the start in which it does something else than from then on.

        It searches for parameters, calibrates itself, or has not begun, as ``postlocalsgd`` before
        its `start`. Schedules and codecs count exchanges, so the steps of a cycle count together.
        """
        parts = (self.schedule, self.codec)
        exchanges = max(getattr(part, "opening_steps", 0) for part in parts)
        return max(exchanges * self.cycle_steps, getattr(self.frequency, "opening_steps", 0))

    @property
    def slug(self) -> str:
        """A name for its files: letters, digits, ``.``, ``-`` and ``_`` only."""
        return re.sub(r"[^A-Za-z0-9._]+", "-", self.spec)
