"""Training steps and phases of a rank, from the marks that PyTorch leaves in a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]

NO_STEP: Final = -1


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
