"""Training steps and phases of a rank, from the marks that PyTorch leaves in a profile.

Steps of a file whose program did not mark them are derived from what each step repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Intervals, sorted by start: what they are, and the thread they are of.

    Attributes:
        start: Starts.
        end: Ends.
        label: One number per interval: a step's number, or an index into names.
        thread: Code of the thread.
    """

    start: Times
    end: Times
    label: npt.NDArray[Any]
    thread: npt.NDArray[Any]

    @classmethod
    def of(
        cls, start: Times, end: Times, label: npt.NDArray[Any], thread: npt.NDArray[Any]
    ) -> Spans:
        """Sorts intervals by start."""
        order = np.argsort(start, kind="stable")
        return cls(start[order], end[order], label[order], thread[order])

    def __len__(self) -> int:
        return len(self.start)

    def at(self, times: Times) -> Times:
        """Label of the last interval begun that contains each time, else -1."""
        if not len(self):
            return np.full(len(times), -1, dtype=np.int64)
        index = np.searchsorted(self.start, times, side="right") - 1
        inside = (index >= 0) & (times < self.end[index])
        return np.where(inside, self.label[index], -1)

    def at_in_thread(self, times: Times, threads: npt.NDArray[Any]) -> Times:
        """Like `at`, with the intervals of the same thread only."""
        if not len(self) or not len(times):
            return np.full(len(times), -1, dtype=np.int64)
        # Intervals and times in one order: by thread, then by time, an interval before a time.
        count = len(self)
        thread = np.concatenate([self.thread, threads])
        time = np.concatenate([self.start, times])
        is_time = np.arange(len(time)) >= count
        order = np.lexsort((is_time, time, thread))
        last = np.maximum.accumulate(np.where(is_time[order], -1, np.arange(len(order))))
        asked = np.flatnonzero(is_time[order])
        interval = order[last[asked]]
        row = order[asked] - count
        known = (last[asked] >= 0) & (self.thread[interval % count] == threads[row])
        known &= times[row] < self.end[interval % count]
        labels = np.full(len(times), -1, dtype=np.int64)
        labels[row[known]] = self.label[interval[known]]
        return labels


def backward_calls(engine: Spans, boundaries: Times) -> Spans:
    """Calls of autograd's engine, from the functions that it ran.

    The profile shows each function but not the call. Functions of one thread belong to one
    call unless something that begins another part of the step lies between them.

    Args:
        engine: The functions that the engine ran.
        boundaries: Sorted times at which a forward, an optimizer's or a profiler's step or a
            fetch of data begins, on any thread.

    Returns:
        One interval per call and thread.
    """
    if not len(engine):
        return engine
    part = np.searchsorted(boundaries, engine.start, side="right")
    order = np.lexsort((engine.start, part, engine.thread))
    part, thread = part[order], engine.thread[order]
    first = np.flatnonzero(np.r_[True, (part[1:] != part[:-1]) | (thread[1:] != thread[:-1])])
    return Spans.of(
        engine.start[order][first],
        np.maximum.reduceat(engine.end[order], first),
        np.zeros(len(first), dtype=np.int64),
        thread[first],
    )


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
