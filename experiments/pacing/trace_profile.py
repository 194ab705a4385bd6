"""Derives a pace profile from a trace of any format: the device times of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.experiments.pacing.profile import PaceProfile
from ddltrace.tracer.errors import TraceError

_COLUMNS: Final = ["start_ns", "end_ns", "kind", "name", "phase", "step"]
_NS_PER_US: Final = 1e3

_Array = npt.NDArray[np.float64]


def profile_of_trace(path: Path) -> PaceProfile:
    """Reads the layers' times from a trace.

    Of the lowest rank, the step of median length among the later half of the steps. The pieces
    are the device's kernels, by the phase that launched them; of a job without a device, the
    innermost layers of the forward pass, and the intervals between gradients of the backward
    pass; where neither was recorded, each phase as a whole, without its waits for messages.

    Args:
        path: A trace, or a file or folder of a format that can be imported.

    Raises:
        TraceError: It cannot be read, or has no step with a forward and a backward pass.
    """
    trace = open_trace(path)
    for events in _steps(trace):
        forward, backward, pieces = _pieces(events)
        if len(forward) and len(backward) and forward.sum() > 0 and backward.sum() > 0:
            step = int(events["step"][0].as_py())
            return PaceProfile(
                name=str(path),
                source=f"{pieces} of step {step} of rank {trace.ranks[0]} of {path}",
                forward_us=tuple((forward / _NS_PER_US).tolist()),
                backward_us=tuple((backward / _NS_PER_US).tolist()),
            )
    raise TraceError(f"{path} has no step with a forward and a backward pass: nothing to pace by")


def _steps(trace: Trace) -> list[pa.Table]:
    """The events of steps of the lowest rank, that of median length first."""
    if not trace.ranks:
        return []
    table = trace.events(trace.ranks[0]).select(_COLUMNS)
    frame = _Columns(table)
    rows = np.flatnonzero((frame.kind == "step") & ~np.isnan(frame.end) & ~np.isnan(frame.step))
    later = rows[len(rows) // 2 :]
    lengths = frame.end[later] - frame.start[later]
    by_distance = later[np.argsort(np.abs(lengths - np.median(lengths)))] if len(later) else later
    return [table.filter(pa.array(frame.step == frame.step[row])) for row in by_distance[:8]]


class _Columns:
    """Columns of some events as numpy arrays; unknown times and steps are NaN."""

    def __init__(self, table: pa.Table) -> None:
        self.start, self.end, self.step = (
            np.array(table[name].to_numpy(), dtype=np.float64)
            for name in ("start_ns", "end_ns", "step")
        )
        self.kind, self.name, self.phase = (
            np.array(table[name].cast("string").to_pylist(), dtype=object)
            for name in ("kind", "name", "phase")
        )

    def lengths(self, rows: npt.NDArray[np.bool_]) -> _Array:
        """Lengths of the intervals among some rows, in order of their starts."""
        known = np.flatnonzero(rows & ~np.isnan(self.end))
        known = known[np.argsort(self.start[known], kind="stable")]
        return self.end[known] - self.start[known]


def _pieces(table: pa.Table) -> tuple[_Array, _Array, str]:
    """Times of the forward and of the backward pass in order, and a description of the pieces."""
    frame = _Columns(table)
    kernels = frame.kind == "kernel"
    forward, backward = (
        frame.lengths(kernels & (frame.phase == phase)) for phase in ("forward", "backward")
    )
    if len(forward) and len(backward):
        return forward, backward, "the device's kernels"
    forward, backward = _innermost_layers(frame), _between_gradients(frame)
    if len(forward) and len(backward):
        return forward, backward, "the layers and gradients"
    return _whole(frame, "forward"), _whole(frame, "backward"), "the phases"


def _innermost_layers(frame: _Columns) -> _Array:
    """Times of the layers in which no other layer was called."""
    rows = np.flatnonzero((frame.kind == "layer") & ~np.isnan(frame.end))
    if not len(rows):
        return np.empty(0)
    rows = rows[np.lexsort((-frame.end[rows], frame.start[rows]))]
    start, end = frame.start[rows], frame.end[rows]
    holds_next = np.append((start[1:] < end[:-1]), False)
    return np.asarray((end - start)[~holds_next])


def _between_gradients(frame: _Columns) -> _Array:
    """Times from the start of the backward pass to the first gradient, and between gradients."""
    begins = frame.start[(frame.kind == "phase") & (frame.phase == "backward")]
    ready = np.unique(frame.start[(frame.kind == "gradient") & (frame.phase == "backward")])
    if not len(begins) or not len(ready):
        return np.empty(0)
    return np.diff(np.concatenate([[begins.min()], ready[ready > begins.min()]]))


def _whole(frame: _Columns, phase: str) -> _Array:
    """The time of a phase less its waits for messages; empty if it was not recorded."""
    lengths = frame.lengths((frame.kind == "phase") & (frame.phase == phase))
    waits = frame.lengths((frame.kind == "wait") & (frame.phase == phase))
    if not len(lengths):
        return np.empty(0)
    return np.array([max(0.0, float(lengths.sum() - waits.sum()))])
