"""Steps of a file whose program did not mark them, from what each step repeats."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]

_MIN_REPEATS: Final = 4
"""Fewer repetitions of a sequence may be chance."""

_EQUAL: Final = 0.9
"""Share of kernels that must have the same name one period later."""

_MIN_PERIOD: Final = 3
_MAX_ANCHORS: Final = 16


def optimizer_steps(
    start: Times, end: Times, name: npt.NDArray[np.int32], work: Times, first: int
) -> tuple[Times, Times]:
    """Steps that end where an optimizer's step ends.

    Calls inside another call, and calls without a forward or backward pass since the one before,
    belong to one step. With several optimizers, that of the last call ends a step.

    Args:
        start: Starts of the calls, sorted, in nanoseconds.
        end: Their ends.
        name: Code of each call's name.
        work: Sorted times at which forward and backward work begins.
        first: When the recording begins.

    Returns:
        Starts and ends of the steps; the first begins with the recording.
    """
    outer = start >= np.maximum.accumulate(np.r_[first, end[:-1]])
    outer &= name == name[outer][-1]
    start, end = start[outer], end[outer]
    since = np.searchsorted(work, start)
    # The last of the calls between which nothing was computed; without marks of work, each.
    is_last = np.r_[since[1:] != since[:-1], True] if len(work) else np.ones(len(start), bool)
    ends = end[is_last]
    return np.r_[first, ends[:-1]], ends


def periodic_steps(name: npt.NDArray[np.int32], time: Times) -> tuple[Times, Times]:
    """Steps from the repetition of kernels: from one run of a kernel to its next.

    The kernel is one that runs as rarely as any that repeats, so that the repetition of layers in
    a step is not taken for steps.

    Args:
        name: Codes of the kernels' names in their order.
        time: When each was launched, or started where that is unknown, in nanoseconds.

    Returns:
        Starts and ends of the steps; empty where the kernels do not repeat.
    """
    none = np.empty(0, dtype=np.int64)
    times = np.bincount(name) if len(name) else none
    repeated = np.flatnonzero(times >= _MIN_REPEATS)
    for code in repeated[np.argsort(times[repeated], kind="stable")][:_MAX_ANCHORS].tolist():
        places = np.flatnonzero(name == code)
        period = int(np.median(np.diff(places)))
        if period < _MIN_PERIOD:
            continue
        inside = name[places[0] : places[-1] + 1]
        if (inside[period:] == inside[:-period]).mean() >= _EQUAL:
            begins = np.sort(time[places])
            return begins[:-1], begins[1:]
    return none, none
