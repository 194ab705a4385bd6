"""What ``ddltrace experiment calibrate`` has measured: the costs of messages on a machine.

The file is JSON: ``schema`` (``ddltrace.calibration/1``), ``library``, ``created`` and ``points``,
the median time of an all_reduce of each size on each number of ranks, as objects with
``ranks``, ``bytes``, ``us``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ddltrace.analyzer.whatif.costs import bytes_on_link, messages_in_a_row
from ddltrace.tracer.errors import UsageError

SCHEMA: Final = "ddltrace.calibration/1"
FILE: Final = "calibration.json"
"""Its name in the folder of a trace."""


class Point(msgspec.Struct, frozen=True):
    """The median time of an all_reduce."""

    ranks: int
    bytes: int
    us: float


class Calibration(msgspec.Struct, frozen=True):
    """All that was measured; see the module."""

    schema: str
    library: str
    created: str
    points: list[Point]

    def overhead_ns(self) -> float:
        """The overhead of a message, by the fit of least relative error over all points."""
        terms = np.array(
            [
                (
                    messages_in_a_row("all_reduce", point.ranks) / point.us,
                    bytes_on_link("all_reduce", point.ranks, point.bytes) / point.us,
                )
                for point in self.points
            ]
        )
        found, *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
        return max(float(found[0]), 0.0) * 1e3


def read_calibration(path: Path) -> float:
    """The overhead of a message by the file of a calibration, ns.

    Raises:
        UsageError: It is not a calibration.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is not a calibration: {error}") from error
    usable = [point for point in found.points if point.ranks > 1 and point.us > 0]
    if found.schema != SCHEMA or len(usable) < len(found.points) or len(usable) < 2:
        raise UsageError(
            f"{path} is not a calibration of {SCHEMA}: write one with ddltrace experiment calibrate"
        )
    return found.overhead_ns()
