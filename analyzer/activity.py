"""What a rank does when, as sets of instants: compute, communication, copies, data, update.

On a rank whose device work is seen (kernels on streams: a GPU, an imported trace) compute is
the union of its kernels. On a CPU rank the host computes: the union of phases (forward,
backward, optimizer), layers and codecs of each thread, without the times in which that
thread waits for a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.columns import Columns, IntArray
from ddltrace.analyzer.intervals import EMPTY, Spans, intersect, merge, subtract, union
from ddltrace.analyzer.messages import Messages, Waits

COMPUTE_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Activity:
    """One rank's activity over the whole trace.

    Attributes:
        device: Whether its kernels are seen; else its host's work stands for its compute.
        compute: C; None where the trace tells nothing of the rank's compute.
        comm: M.
        copies: Copies and fills on the device.
        data: Fetching batches.
        update: The optimizer's phases.
        blocked: A host thread waits for a message.
        host: A host thread is inside of a step, a phase, a marker or an imported operation.
        both: C n M.
        work: All device work: C, M and copies.
    """

    device: bool
    compute: Spans | None
    comm: Spans
    copies: Spans
    data: Spans
    update: Spans
    blocked: Spans
    host: Spans
    both: Spans
    work: Spans


def measure_activity(columns: Columns, messages: Messages, waits: Waits) -> Activity:
    """Finds a rank's activity in its events."""
    kernels = columns.rows("kernel")
    device = len(kernels) > 0
    phases = columns.rows("phase")
    phase_name = columns.name[phases]
    compute: Spans | None
    if device:
        compute = _spans(columns, kernels)
    else:
        known = [code for code, name in enumerate(columns.names) if name in COMPUTE_PHASES]
        rows = np.concatenate([phases[np.isin(phase_name, known)], columns.rows("layer", "codec")])
        compute = _host_compute(columns, rows, waits) if len(rows) else None
    updates = [code for code, name in enumerate(columns.names) if name == "optimizer"]
    comm = messages.spans()
    copies = _spans(columns, columns.rows("copy"))
    return Activity(
        device=device,
        compute=compute,
        comm=comm,
        copies=copies,
        data=_spans(columns, columns.rows("data")),
        update=_spans(columns, phases[np.isin(phase_name, updates)]),
        blocked=union(waits.start, waits.end),
        host=_spans(columns, columns.rows("step", "phase", "marker", "host")),
        both=EMPTY if compute is None else intersect(compute, comm),
        work=merge(EMPTY if compute is None else compute, comm, copies),
    )


def _host_compute(columns: Columns, rows: IntArray, waits: Waits) -> Spans:
    lanes = columns.lane[rows]
    parts = []
    for lane in np.unique(lanes):
        waiting = waits.lane == lane
        blocked = union(waits.start[waiting], waits.end[waiting])
        parts.append(subtract(_spans(columns, rows[lanes == lane]), blocked))
    return merge(*parts)


def _spans(columns: Columns, rows: IntArray) -> Spans:
    """The instants in any of the rows; one whose end is not known extends to nothing."""
    return union(columns.start[rows], columns.end[rows])
