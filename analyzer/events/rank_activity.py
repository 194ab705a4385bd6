"""The activities of a rank as sets of instants: compute, communication, copies, data, update.

On a rank with recorded device work (kernels on streams: a GPU, an imported trace), compute is the
union of its kernels. On a CPU rank, the host computes: compute is the union of phases (forward,
backward, optimizer), layers and codecs of each thread, without the times in which that thread
waits for a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddltrace.analyzer.events.copies import DIRECTIONS, copy_direction
from ddltrace.analyzer.events.event_columns import NULL, PHASE, Columns, IntArray, distinct
from ddltrace.analyzer.events.interval_sets import (
    EMPTY,
    Growing,
    Spans,
    intersect,
    merge,
    subtract,
    union,
)
from ddltrace.analyzer.events.process_stops import StopBuilder
from ddltrace.analyzer.events.rank_messages import Messages, Waits

COMPUTE_PHASES = ("forward", "backward", "optimizer")
_HOST_KINDS = ("phase", "layer", "codec", "data", "host")


@dataclass(frozen=True)
class Activity:
    """One rank's activity over the whole trace.

    Attributes:
        device: Whether its kernels were recorded; otherwise the host's work counts as compute.
        compute: C; None if the trace contains no compute of the rank.
        comm: M.
        copies: Copies and fills on the device.
        copies_by_direction: The same by direction, in the order of `DIRECTIONS`; sets of copies
            that run at the same time have instants in common.
        data: Fetching batches.
        update: The optimizer's phases, on the host.
        device_update: The optimizer's kernels.
        phases: The host is in a forward or backward pass, or in an optimizer's step.
        blocked: A host thread waits for a message.
        host: A host thread is inside of a step, a phase, a marker or an imported operation.
        both: C n M.
        work: All device work: C, M and copies.
        unrecorded: Nothing is recorded, and the trace records nothing of the host: it may have
            worked, or waited. Empty where the host is recorded.
        stopped: No thread of the process ran, and it did not wait for a message: the host does
            nothing then.
        comm_known: Whether the end of some message is known, or none has ended.
    """

    device: bool
    compute: Spans | None
    comm: Spans
    copies: Spans
    copies_by_direction: tuple[Spans, ...]
    data: Spans
    update: Spans
    device_update: Spans
    phases: Spans
    blocked: Spans
    host: Spans
    both: Spans
    work: Spans
    unrecorded: Spans = EMPTY
    stopped: Spans = EMPTY
    comm_known: bool = True


class ActivityBuilder:
    """Determines a rank's activity from its events, which are added in parts.

    Args:
        operations_only: Whether the trace records operations and nothing between them; None to
            find out: then the host is recorded if there is any event of it other than steps,
            markers and waits.
        stopped: Times in each of which the process was stopped once.
    """

    def __init__(self, *, operations_only: bool | None = None, stopped: Spans = EMPTY) -> None:
        self._stops = StopBuilder(stopped)
        self._operations_only = operations_only
        self._host_seen = False
        self._recorded_host = Growing()
        self._steps = Growing()
        self._device = False
        self._host_computes = False
        self._kernels = Growing()
        self._on_lane: dict[str | None, Growing] = {}
        self._copies = [Growing() for _ in DIRECTIONS]
        self._data = Growing()
        self._phases = Growing()
        self._update = Growing()
        self._device_update = Growing()
        self._host = Growing()

    def add(self, columns: Columns) -> None:
        """Adds a part of the events."""
        self._stops.add(columns)
        kernels, phases = columns.rows("kernel"), columns.rows("phase")
        self._device |= len(kernels) > 0
        _add(self._kernels, columns, kernels)
        of_optimizer = columns.phase[kernels] == PHASE["optimizer"]
        _add(self._device_update, columns, kernels[of_optimizer])
        names = columns.name[phases]
        computes = phases[np.isin(names, _codes(columns.names, COMPUTE_PHASES))]
        self._add_compute(columns, np.concatenate([computes, columns.rows("layer", "codec")]))
        self._add_copies(columns)
        _add(self._phases, columns, phases)
        _add(self._data, columns, columns.rows("data"))
        _add(self._update, columns, phases[np.isin(names, _codes(columns.names, ("optimizer",)))])
        _add(self._host, columns, columns.rows("step", "phase", "marker", "host"))
        of_host = columns.rows(*_HOST_KINDS)
        self._host_seen |= len(of_host) > 0
        if self._operations_only or not self._host_seen:
            _add(self._recorded_host, columns, of_host)
            _add(self._steps, columns, columns.rows("step"))

    def finish(self, messages: Messages, waits: Waits) -> Activity:
        """Returns the activity of all added events."""
        blocked = union(waits.start, waits.end)
        stopped = subtract(self._stops.finish(), blocked)
        compute: Spans | None = None
        if self._device:
            compute = self._kernels.spans()
        elif self._host_computes:
            compute = subtract(self._host_compute(waits), stopped)
        comm = messages.spans()
        by_direction = tuple(spans.spans() for spans in self._copies)
        copies = merge(*by_direction)
        work = merge(EMPTY if compute is None else compute, comm, copies)
        unrecorded = self._unrecorded(work)
        return Activity(
            device=self._device,
            compute=compute,
            comm=comm,
            copies=copies,
            copies_by_direction=by_direction,
            data=subtract(self._data.spans(), stopped),
            update=subtract(self._update.spans(), stopped),
            device_update=self._device_update.spans(),
            phases=self._phases.spans(),
            blocked=blocked,
            host=subtract(self._host.spans(), merge(unrecorded, stopped)),
            both=EMPTY if compute is None else intersect(compute, comm),
            work=work,
            unrecorded=unrecorded,
            stopped=stopped,
            comm_known=bool((messages.closed | messages.unfinished)[messages.in_flight].any())
            or not messages.in_flight.any(),
        )

    def _unrecorded(self, work: Spans) -> Spans:
        """The times without a record between the first and the last event."""
        operations_only = self._operations_only
        if operations_only is None:
            operations_only = self._device and not self._host_seen
        every = merge(self._steps.spans(), work) if operations_only else EMPTY
        if not len(every.start):
            return EMPTY
        whole = Spans(every.start[:1], every.end[-1:])
        return subtract(whole, merge(work, self._data.spans(), self._recorded_host.spans()))

    def _add_copies(self, columns: Columns) -> None:
        rows = columns.rows("copy")
        if not len(rows):
            return
        directions = [DIRECTIONS.index(copy_direction(name)) for name in columns.names]
        code = np.array([*directions, DIRECTIONS.index("other")])[columns.name[rows]]
        for direction in distinct(code).tolist():
            _add(self._copies[direction], columns, rows[code == direction])

    def _add_compute(self, columns: Columns, rows: IntArray) -> None:
        self._host_computes |= len(rows) > 0
        lanes = columns.lane[rows]
        for lane in distinct(lanes).tolist():
            name = None if lane == NULL else columns.lanes[lane]
            _add(self._on_lane.setdefault(name, Growing()), columns, rows[lanes == lane])

    def _host_compute(self, waits: Waits) -> Spans:
        parts = []
        for lane, spans in self._on_lane.items():
            code = waits.lanes.index(lane) if lane in waits.lanes else NULL
            # Events without a lane count as one lane; a lane without waits has no code.
            waiting = waits.lane == (code if lane is None or code != NULL else len(waits.lanes))
            blocked = union(waits.start[waiting], waits.end[waiting])
            parts.append(subtract(spans.spans(), blocked))
        return merge(*parts)


def measure_activity(columns: Columns, messages: Messages, waits: Waits) -> Activity:
    """Determines a rank's activity from all its events at once."""
    builder = ActivityBuilder()
    builder.add(columns)
    return builder.finish(messages, waits)


def _codes(names: list[str], wanted: tuple[str, ...]) -> list[int]:
    return [code for code, name in enumerate(names) if name in wanted]


def _add(spans: Growing, columns: Columns, rows: IntArray) -> None:
    """The instants in any of the rows; one whose end is not known extends to nothing."""
    if len(rows):
        spans.add(columns.start[rows], columns.end[rows])
