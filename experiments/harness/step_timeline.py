"""One step of a trace as bars on one axis: compute, waits and messages of the lowest rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.open_trace import open_trace
from ddltrace.experiments.harness.results import Run
from ddltrace.tracer.errors import DdltraceError

MOST_BARS: Final = 400
"""Maximum number of bars of one lane; the shortest ones are left out."""

_LANES: Final = {
    "phase": "compute",
    "wait": "compute",
    "codec": "codec",
    "message": "network",
}
_ROLES: Final = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "update",
    "wait": "wait",
    "codec": "codec",
    "message": "collective",
}


@dataclass(frozen=True)
class Bar:
    """One interval.

    Attributes:
        lane: ``compute``, ``codec`` or ``network``.
        role: Its colour's name in the palette.
        name: Name of the event.
        start_ms, ms: Start relative to the step's start, and duration; clipped to the step.
    """

    lane: str
    role: str
    name: str
    start_ms: float
    ms: float


@dataclass(frozen=True)
class StepTimeline:
    """One step.

    Attributes:
        step: Its number.
        wall_ms: Its length on the rank.
        bars: Its intervals.
        left_out: Number of short bars that are not in `bars`.
    """

    step: int
    wall_ms: float
    bars: list[Bar]
    left_out: int


def median_step_timeline(run: Run, directory: Path) -> StepTimeline | None:
    """The step of a run whose length on the lowest rank is the median of the steady ones.

    Args:
        run: A run with a trace.
        directory: The experiment's directory, to which the trace's path is relative.

    Returns:
        The step; None if its trace is not there or has no such steps.
    """
    if run.trace is None or run.first_step is None:
        return None
    try:
        trace = open_trace(directory / run.trace)
        if not trace.ranks:
            return None
        table = trace.events(trace.ranks[0])
    except DdltraceError:
        return None
    kinds = table["kind"].cast("string")
    steps = table.filter(
        pc.fill_null(
            pc.and_(pc.equal(kinds, "step"), pc.greater_equal(table["step"], run.first_step)), False
        )
    )
    steps = steps.filter(pc.is_valid(steps["end_ns"]))
    if not steps.num_rows:
        return None
    lengths = pc.subtract(steps["end_ns"], steps["start_ns"]).to_numpy()
    row = int(np.argsort(lengths)[(len(lengths) - 1) // 2])
    start, end = int(steps["start_ns"][row].as_py()), int(steps["end_ns"][row].as_py())
    inside = pc.and_(pc.less(table["start_ns"], end), pc.greater(table["end_ns"], start))
    wanted = pc.is_in(kinds, pa.array(list(_LANES)))
    rows = table.filter(pc.fill_null(pc.and_(inside, wanted), False))
    bars = [
        bar
        for event in rows.select(["start_ns", "end_ns", "kind", "name", "op"]).to_pylist()
        if (bar := _bar(event, start, end)) is not None
    ]
    kept = _longest(bars)
    return StepTimeline(
        int(steps["step"][row].as_py()), (end - start) / 1e6, kept, len(bars) - len(kept)
    )


def _bar(event: dict[str, Any], start: int, end: int) -> Bar | None:
    kind, name = event["kind"], event["name"] or event["op"] or event["kind"]
    role = _ROLES.get(name if kind == "phase" else kind)
    if role is None:
        return None
    first, last = max(event["start_ns"], start), min(event["end_ns"], end)
    return Bar(_LANES[kind], role, str(name), (first - start) / 1e6, (last - first) / 1e6)


def _longest(bars: list[Bar]) -> list[Bar]:
    kept: list[Bar] = []
    for lane in sorted({bar.lane for bar in bars}):
        own = sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: -bar.ms)
        kept += own[:MOST_BARS]
    return sorted(kept, key=lambda bar: bar.start_ms)
