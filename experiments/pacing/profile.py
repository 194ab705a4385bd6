"""The device times of a model's layers, and the file that stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.json_files import write_json_atomically

PROFILE_FILE: Final = "pace.json"
"""Name of an experiment's profile in its directory."""


@dataclass(frozen=True)
class PaceProfile:
    """Device times of one training step.

    Attributes:
        name: Name of a built-in profile, or the trace's path.
        source: Source of the times, as a sentence.
        forward_us: Time of each piece of the forward pass in order, microseconds.
        backward_us: Time of each piece of the backward pass in order: the output layer first.
    """

    name: str
    source: str
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]

    def for_layers(self, count: int) -> PaceProfile:
        """The same curve of times for a model with another number of layers.

        The sums stay. A layer gets the times of the pieces that cover the same part of the pass
        by their number; a piece that two layers share is divided between them.

        Args:
            count: Number of layers.
        """
        return PaceProfile(
            self.name,
            self.source,
            _resampled(self.forward_us, count),
            _resampled(self.backward_us, count),
        )

    def slowed(self, factor: float) -> PaceProfile:
        """The same times, each `factor` times as long."""
        return PaceProfile(
            self.name,
            self.source,
            tuple(time * factor for time in self.forward_us),
            tuple(time * factor for time in self.backward_us),
        )

    def write(self, path: Path) -> None:
        """Writes the profile as JSON."""
        write_json_atomically(path, asdict(self))


def read_profile(path: Path) -> PaceProfile:
    """Reads a profile that `PaceProfile.write` wrote.

    Raises:
        TraceError: The file cannot be read or is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PaceProfile)
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"{path} cannot be read as a pace profile: {error}") from error


def _resampled(times: Sequence[float], count: int) -> tuple[float, ...]:
    import numpy as np

    total = np.concatenate([[0.0], np.cumsum(times)])
    at = np.linspace(0, len(times), count + 1)
    return tuple(np.diff(np.interp(at, np.arange(len(total)), total)).tolist())
