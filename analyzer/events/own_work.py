"""A rank's own work by activity: its time without the times in which it is blocked on messages.

The activities are disjoint, and together with the blocked times they cover the rank's time between
its first and its last event. If the timeline of the rank is available, they are those of the
critical path. In a trace of very many ranks it is not available; then an instant with several
activities counts as the first of: on a CPU rank update, compute, data, copy; on a rank with
recorded device work update (the optimizer's kernels), compute, copy, data. The rest is stopped
while no thread of the process ran (`Activity.stopped`), unrecorded where the trace records nothing
of the host (`Activity.unrecorded`), or host.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from ddltrace.analyzer.events.interval_sets import EMPTY, Spans, intersect, subtract, union
from ddltrace.analyzer.events.rank_activity import Activity
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.events.rank_timeline import CATEGORY, Timeline

_WORK: Final = ("compute", "update", "data", "copy")
ACTIVITIES: Final = (*_WORK, "host", "unrecorded", "stopped")


OwnWork: TypeAlias = dict[str, Spans]
"""A set of instants for each of `ACTIVITIES`."""


def own_work(scan: RankScan) -> OwnWork:
    """The rank's own work by activity."""
    free = unblocked(scan)
    if scan.timeline is not None:
        return _of_timeline(scan.timeline, free, scan.activity)
    activity = scan.activity
    compute = EMPTY if activity.compute is None else activity.compute
    if activity.device:
        parts = {"update": activity.device_update, "compute": compute, "copy": activity.copies}
        parts["data"] = activity.data
    else:
        parts = {"update": activity.update, "compute": compute, "data": activity.data}
        parts["copy"] = activity.copies
    found: dict[str, Spans] = {}
    for name, spans in parts.items():
        found[name] = intersect(spans, free)
        free = subtract(free, found[name])
    return {name: found[name] for name in _WORK} | _rest(free, activity)


def _of_timeline(line: Timeline, free: Spans, activity: Activity) -> dict[str, Spans]:
    found: dict[str, Spans] = {}
    rest = free
    for name in _WORK:
        its = line.segments.spans(line.segments.category == CATEGORY[name])
        found[name] = intersect(its, free)
        rest = subtract(rest, found[name])
    return found | _rest(rest, activity)


def _rest(free: Spans, activity: Activity) -> dict[str, Spans]:
    stopped = intersect(free, activity.stopped)
    free = subtract(free, stopped)
    return {
        "host": subtract(free, activity.unrecorded),
        "unrecorded": intersect(free, activity.unrecorded),
        "stopped": stopped,
    }


def unblocked(scan: RankScan) -> Spans:
    """Returns all of the rank's own work."""
    whole = union(np.array([scan.first]), np.array([scan.last]))
    blocked = union(*scan.blocks[:2])
    return subtract(whole, blocked)
