"""Reads from a trace when a strategy searched or calibrated, and what it sent for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from ddltrace.analyzer.trace.opened_trace import Trace
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
