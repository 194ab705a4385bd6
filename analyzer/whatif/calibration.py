"""What ``ddltrace experiment calibrate`` has measured: the costs of messages on a machine.

The file is JSON: ``schema`` (``ddltrace.calibration/4``), ``library`` and ``created``; ``points``,
the median time of an all_reduce of each size on each number of ranks, as objects with ``ranks``,
``bytes``, ``us``; ``exchanges``, how much longer processors are busy with a training step if the
engine averages messages with a codec or architecture, as objects with ``strategy``, ``ranks``,
``elements``, ``gradients`` (how many a message carries), ``lengths`` (how many different ones these
have: codecs treat those of one length together), ``us`` (an eighth of eight messages at once) and
``alone_us`` (a message alone). Where ranks outnumber processors, these two are processor time,
summed over ranks, by processor; else time on links of at least 10 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from ddltrace.analyzer.whatif.costs import SMALL, messages_in_a_row
from ddltrace.tracer.errors import UsageError

SCHEMA: Final = "ddltrace.calibration/4"
FILE: Final = "calibration.json"
"""Its name in the folder of a trace."""
AT_ONCE: Final = 8
"""Messages that are in flight while exchanges are timed, as in a step."""

BUCKET: Final = 512
"""Elements to a multiple of which most codecs round up the part of a gradient that a rank averages.

A gradient of no more elements is averaged by one rank."""

_SMALL_LENGTH: Final = 0.5
"""What a length of at most a bucket takes, as a share of what a longer one takes: an estimate.

All ranks encode and decode it, but only one averages it and encodes the average."""

_Ranks = Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Time = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class Point(msgspec.Struct, frozen=True):
    """The median time of an all_reduce."""

    ranks: _Ranks
    bytes: _Count
    us: _Time


class Exchanged(msgspec.Struct, frozen=True):
    """How long processors are busy when the engine averages a message of float32."""

    strategy: str
    ranks: _Ranks
    elements: _Count
    us: _Time
    gradients: _Count = 1
    lengths: _Count = 1
    alone_us: _Time | None = None


class Calibration(msgspec.Struct, frozen=True):
    """All that was measured; see the module."""

    schema: str
    library: str
    created: str
    points: Annotated[list[Point], msgspec.Meta(min_length=2)]
    exchanges: list[Exchanged] = []

    def exchange_ns(
        self, strategy: str, gradients: Sequence[int], *, messages: int
    ) -> float | None:
        """What the engine's average of a vector takes of the processors; None if not measured.

        A step's messages take a fixed time together and a time each, which follow from a message
        alone and from eight at once.

        Args:
            strategy: A codec, an architecture, or ``ddp``, which sends messages as they are.
            gradients: Elements of each gradient in it.
            messages: How many a step has.
        """
        lengths = sum(1 if each > BUCKET else _SMALL_LENGTH for each in set(gradients))
        asked = (1, sum(gradients), len(gradients), lengths)
        points = [each for each in self.exchanges if each.strategy == strategy]
        terms = np.array([(1, each.elements, each.gradients, each.lengths) for each in points])
        if len(terms) < 4:
            return None

        def fitted(times: list[float]) -> float:
            found, *_ = np.linalg.lstsq(terms, np.array(times), rcond=None)
            return max(float(found @ asked), min(times))

        eighth = fitted([each.us for each in points])
        alone = fitted([max(each.alone_us or 0.0, each.us) for each in points])
        each_us = (AT_ONCE * eighth - alone) / (AT_ONCE - 1)
        return 1e3 * (each_us + (alone - each_us) / messages)

    def overhead_ns(self, ranks: int) -> float:
        """The overhead of a message by the small vectors, on the nearest number of ranks.

        Args:
            ranks: How many ranks exchange messages.
        """
        nearest = min((point.ranks for point in self.points), key=lambda each: abs(each - ranks))
        times = [(point.bytes, point.us) for point in self.points if point.ranks == nearest]
        least = min(size for size, _ in times)
        small = [us for size, us in times if size <= max(SMALL, least)]
        return float(np.median(small)) * 1e3 / messages_in_a_row("all_reduce", nearest)


def read_calibration(path: Path) -> Calibration:
    """Reads the file of a calibration.

    Raises:
        UsageError: It is not a calibration.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is not a calibration: {error}") from error
    if found.schema != SCHEMA:
        raise UsageError(
            f"{path} is not a calibration of {SCHEMA}: write one with ddltrace experiment calibrate"
        )
    return found
