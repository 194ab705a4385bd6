"""Time series of queue lengths and copy bandwidths as HTA 0.5.0 computes them, as text for labels.

A series has two columns: times, in microseconds since the first event of all ranks, and values. In
the labels of a run it is text: both columns as 64-bit numbers, each as the difference of its bits
from those of the number before, compressed (zlib) and in base 64. So a series takes some bytes per
change, and reading it back gives exactly the same numbers.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ddltrace.tracer.errors import TraceError

Floats = npt.NDArray[np.float64]

_MOST_BYTES: Final = 1 << 30
"""A series does not decompress to more."""


class Series(NamedTuple):
    """A step function: each value holds until the next time.

    Attributes:
        time: Microseconds.
        value: From then on.
    """

    time: Floats
    value: Floats

    def since(self, first: float) -> Series:
        """The same with times counted from `first`."""
        return Series(self.time - first, self.value)


SeriesTables = dict[str, dict[str, Series]]
"""``queue`` or ``bandwidth`` -> stream or kind of copy -> series."""


def to_text(series: Series) -> str:
    """Packs a series."""
    bits = np.stack(series).astype("<f8").view("<i8")
    changes = np.diff(bits, axis=1, prepend=0)
    return base64.b64encode(zlib.compress(changes.astype("<i8").tobytes())).decode("ascii")


def from_text(text: Any) -> Series:
    """Unpacks a series.

    Raises:
        TraceError: The text is none that `to_text` wrote.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError("too long, or cut")
        columns = np.cumsum(np.frombuffer(data, "<i8").reshape(2, -1), axis=1).view("<f8")
        if not np.isfinite(columns).all():
            raise ValueError("not a number")
    except (TypeError, ValueError, zlib.error, binascii.Error) as error:
        raise TraceError(
            "run.json is damaged: a time series by HTA's definitions cannot be read; import the "
            "Kineto files again"
        ) from error
    return Series(*columns)
