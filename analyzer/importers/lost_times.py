"""Finds intervals whose time is unknown although it is written: 0, far before all others."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_FAR_NS: Final = 10**8
_FAR_FROM_BEGINNING_NS: Final = 10**11
_TIMES_FAR: Final = 1000
"""So many times the recording before all others, an interval that begins at 0 covers nothing."""


def without_time(
    start: npt.NDArray[Any],
    duration: npt.NDArray[Any],
    *,
    ns: int = 1,
    may_begin_at_0: bool = False,
) -> npt.NDArray[np.bool_]:
    """Which intervals have the time 0 because theirs is unknown.

    Args:
        start: When each begins, shape (intervals,).
        duration: How long each lasts.
        ns: Length of the unit of these times, nanoseconds.
        may_begin_at_0: Whether the clock may begin with the recording, so that a pause may follow a
            first interval at 0.
    """
    zero = start == 0
    others = ~zero
    if not zero.any() or not others.any():
        return np.zeros(len(start), dtype=bool)
    begin, end = start[others].min(), (start + duration)[others].max()
    far = max(end - begin, _FAR_NS // ns)
    if may_begin_at_0:
        far = max(10 * far, _FAR_FROM_BEGINNING_NS // ns)
    unknown: npt.NDArray[np.bool_] = zero & ((begin - duration > far) | (begin > _TIMES_FAR * far))
    return unknown
