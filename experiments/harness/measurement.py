"""Measures one run from its trace and from the outcome that its job wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pyarrow.compute as pc

from ddltrace.analyzer.open_trace import Trace, open_trace
from ddltrace.experiments.harness.results import Run, mean_of_all
from ddltrace.experiments.harness.synchronization_report import (
    notes_of,
    reason_of,
    runs_ahead,
    synchronization_of,
)
from ddltrace.experiments.messages.trace_marks import (
    CALIBRATION,
    CALIBRATION_BEGINS,
    CALIBRATION_ENDS,
)
from ddltrace.tracer.errors import TraceError


@dataclass(frozen=True)
class Calibration:
    """The search or calibration of one run.

    Attributes:
        steps: Steps up to its end; 0 if it ended before the first one.
        has_ended: Whether every search and calibration has ended.
        bytes: Bytes that a rank handed to messages for it, over the whole run: mean over ranks.
        messages: Number of these messages of a rank, likewise.
    """

    steps: int
    has_ended: bool
    bytes: float
    messages: float

    def leave_out_of(self, steps: range) -> range:
        """The steps after the end.

        Args:
            steps: Consecutive steps.

        Raises:
            TraceError: There is none.
        """
        left = range(max(steps.start, self.steps), steps.stop)
        if self.has_ended and left:
            return left
        raise TraceError(
            "the strategy searched or calibrated until the last step, and what it found was not "
            "measured; train more steps"
        )

    def to_json(self) -> dict[str, Any]:
        """The record in ``results.json``."""
        return {"steps": self.steps, "bytes": self.bytes, "messages": self.messages}


def calibration_of(trace: Trace) -> Calibration | None:
    """The calibration of a run, from the marks and messages of all ranks; None without one.

    Args:
        trace: Any trace.
    """
    steps, begun, ended, sent, messages, ranks = 0, 0, 0, 0, 0, 0
    for rank in trace.ranks:
        table = trace.events(rank).select(["kind", "name", "step", "bytes"])
        rows = table.filter(pc.starts_with(table["name"].cast("string"), CALIBRATION)).to_pylist()
        marks = [row for row in rows if row["kind"] == "marker"]
        ends = [row["step"] for row in marks if row["name"] == CALIBRATION_ENDS]
        begun += sum(row["name"] == CALIBRATION_BEGINS for row in marks)
        ended += len(ends)
        steps = max([steps, *(step + 1 for step in ends if step is not None)])
        own = [row for row in rows if row["kind"] == "message"]
        sent += sum(row["bytes"] or 0 for row in own)
        messages += len(own)
        ranks += bool(rows)
    if not ranks:
        return None
    return Calibration(steps, ended >= begun, sent / ranks, messages / ranks)


_DIVERGED_FACTOR: Final = 1e6
"""A finite loss counts as diverged if it is this many times the first one."""


def measure(trace: Path, *, steps: range | None, outcome: dict[str, Any] | None = None) -> Run:
    """Measures one trace.

    Args:
        trace: Directory of the trace.
        steps: The steady steps; None leaves it to the analyzer's rule.
        outcome: The outcome written by the job, for traces of an experiment.

    Returns:
        The run, named after the trace's directory; its status is ``complete`` or ``diverged``.

    Raises:
        TraceError: The trace cannot be read, has none of the steps, or its strategy searched or
            calibrated to the end.
    """
    opened = open_trace(trace)
    window = _steady_steps(opened) if steps is None else steps
    calibration = calibration_of(opened)
    if calibration is not None and window is not None:
        window = calibration.leave_out_of(window)
    found = opened.analyze(window).to_json()
    walls = _step_times(opened, [int(row["step"]) for row in found["steps"]])
    notes = [str(note) for note in found["trace"].get("notes") or []]
    if steps is not None and len(walls) != len(steps):
        notes.append(f"{len(walls)} of {len(steps)} steady steps are in the trace")
    encode_us, decode_us = _codec_times(opened, [int(row["step"]) for row in found["steps"]])
    elapsed = _step_ends(opened)
    synchronization = synchronization_of(opened)
    if synchronization is not None and runs_ahead(synchronization):
        workers = [int(rank) for rank in synchronization["clocks"]]
        walls, elapsed = _own_steps(opened, workers, window)
        notes.append("step time: the mean over ranks, which are not at the same step")
    if synchronization is not None:
        notes += notes_of(synchronization)
    run = Run(
        strategy=trace.resolve().name,
        trace=str(trace),
        first_step=min((int(row["step"]) for row in found["steps"]), default=None),
        step_us=walls,
        elapsed_us=elapsed,
        overlap_ratio=found["summary"]["overlap_ratio"],
        encode_us=encode_us,
        decode_us=decode_us,
        synchronization=synchronization,
        calibration=None if calibration is None else calibration.to_json(),
        notes=[*notes, *(outcome or {}).get("notes", [])],
        **_per_rank_and_step(found),
    )
    run = replace(run, **_from_outcome(outcome or {}))
    broken = None if synchronization is None else reason_of(synchronization)
    return run if broken is None else replace(run, status="failed", reason=broken)


def _steady_steps(trace: Trace) -> range | None:
    """The steps that the analyzer's rule calls steady; None if the trace has none."""
    numbers = [row.step for row in trace.analyze().steps if row.steady]
    return range(min(numbers), max(numbers) + 1) if numbers else None


def _per_rank_and_step(found: dict[str, Any]) -> dict[str, Any]:
    steps = len(found["steps"])
    ranks = found["ranks"]

    def average(key: str) -> float | None:
        values = [row[key] for row in ranks if row.get(key) is not None]
        if not steps or not values or len(values) != len(ranks):
            return None
        return float(sum(values)) / len(values) / steps

    return {
        "exposed_us": average("exposed_comm_us"),
        "payload_bytes": average("bytes_sent"),
        "messages": average("messages"),
    }


def _codec_times(trace: Trace, steps: Sequence[int]) -> tuple[float | None, float | None]:
    """Time of encoding and of decoding, per rank and step; None if there is no codec."""
    if not steps:
        return None, None
    totals = {"encode": 0.0, "decode": 0.0}
    seen = False
    for rank in trace.ranks:
        table = trace.events(rank).select(["start_ns", "end_ns", "kind", "name", "step"])
        of_codec = pc.equal(table["kind"].cast("string"), "codec")
        in_steps = pc.and_(
            pc.greater_equal(table["step"], min(steps)), pc.less_equal(table["step"], max(steps))
        )
        rows = table.filter(pc.fill_null(pc.and_(of_codec, in_steps), False))
        names = pc.fill_null(rows["name"].cast("string"), "")
        lasted = pc.subtract(rows["end_ns"], rows["start_ns"])
        seen = seen or len(rows) > 0
        for what in totals:
            total = pc.sum(lasted.filter(pc.starts_with(names, what))).as_py()
            totals[what] += (total or 0) / 1e3
    if not seen:
        return None, None
    share = 1 / len(trace.ranks) / len(steps)
    return totals["encode"] * share, totals["decode"] * share


def _step_times(trace: Trace, steps: Sequence[int]) -> list[float]:
    """The time that each step adds to the job, in microseconds.

    From the last rank's end of the step before to the last rank's end of the step. Where ranks
    seldom wait for each other, one is in its next step long before another ends this one: times
    from a step's first start to its last end would count that time twice. Time between steps, in
    which no rank has begun the next one, is not part of it.

    Args:
        steps: Numbers of steps that the trace has.
    """
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for rank in trace.ranks:
        for step, start, end in _steps_of(trace, rank):
            starts[step] = min(starts.get(step, start), start)
            ends[step] = max(ends.get(step, end), end)
    begins = [max(starts[step], ends.get(step - 1, starts[step])) for step in steps]
    return [max(ends[step] - begin, 0) / 1e3 for step, begin in zip(steps, begins, strict=True)]


def _steps_of(trace: Trace, rank: int) -> list[tuple[int, int, int]]:
    """Number, start and end of each step that a rank has ended, ns."""
    table = trace.events(rank).select(["step", "start_ns", "end_ns", "kind"])
    ended = pc.and_(pc.is_valid(table["end_ns"]), pc.is_valid(table["step"]))
    rows = table.filter(pc.and_(pc.equal(table["kind"].cast("string"), "step"), ended))
    columns = (rows[name].to_pylist() for name in ("step", "start_ns", "end_ns"))
    return list(zip(*columns, strict=True))


def _step_ends(trace: Trace) -> list[float]:
    """End of every step of the lowest rank, microseconds from the start of its first one."""
    own = _steps_of(trace, trace.ranks[0]) if trace.ranks else []
    first = min((start for _, start, _ in own), default=0)
    return sorted((end - first) / 1e3 for _, _, end in own)


def _own_steps(
    trace: Trace, ranks: Sequence[int], window: range | None
) -> tuple[list[float], list[float]]:
    """Means over ranks that are not at the same step.

    Args:
        ranks: The workers.
        window: The steady steps; None for all but the first.

    Returns:
        The time of each steady step, and the end of each step from the rank's first start, in
        microseconds. A rank that has died counts in the steps that it made.
    """
    times: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    for rank in set(ranks) & set(trace.ranks):
        own = _steps_of(trace, rank)
        begin = min((start for _, start, _ in own), default=0)
        for step, start, end in own:
            times.setdefault(step, []).append((end - start) / 1e3)
            ends.setdefault(step, []).append((end - begin) / 1e3)
    steps = range(1, max(times, default=0) + 1) if window is None else window
    steady = [mean(times[step]) for step in sorted(times) if step in steps]
    return steady, [mean(ends[step]) for step in sorted(ends)]


def _from_outcome(outcome: dict[str, Any]) -> dict[str, Any]:
    losses = outcome.get("losses", [])
    values: dict[str, Any] = {
        "train_loss": _finite(outcome.get("train_loss")),
        "test_loss": _finite(outcome.get("test_loss")),
        "test_accuracy": outcome.get("test_accuracy"),
        "losses": [_finite(loss) for loss in losses],
        "replicas_identical": outcome.get("replicas_identical"),
        "wire_bytes": mean_of_all(outcome.get("wire_bytes_per_step") or []),
        "choices": outcome.get("choices", {}),
        "peak_memory_bytes": max(outcome.get("peak_memory_bytes") or [], default=None),
    }
    reason = _divergence(losses, outcome.get("train_loss"))
    return values if reason is None else {**values, "status": "diverged", "reason": reason}


def _divergence(losses: Sequence[float], final: float | None) -> str | None:
    """Why a training counts as diverged; None if it does not."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return f"the training diverged: the loss of step {step} is {loss}"
        if abs(loss) > _DIVERGED_FACTOR * max(abs(losses[0]), 1.0):
            return f"the training diverged: the loss of step {step} is {loss:.3g}"
    if final is not None and not math.isfinite(final):
        return f"the training diverged: the loss at the end is {final}"
    return None


def _finite(value: float | None) -> float | None:
    """The value if it is finite, since JSON has no infinities; else None."""
    return value if value is not None and math.isfinite(value) else None
