"""Overlap and breakdown by the definitions of Holistic Trace Analysis, for comparison.

On files with one profiler step of whole microseconds and without synchronization records, ours
give the same overlap ratio, idle, compute and span. Elsewhere they differ on purpose: they keep
every step, and fractions of microseconds. These here reproduce what HTA 0.5.0 computes on the
same Kineto files, its conventions included:

- times of files with fractions of microseconds are rounded inwards, starts up and ends down;
- of several profiler steps the last one is dropped, with the kernels that it launched, and so
  are kernels whose launch was not recorded;
- a kernel is communication if its name matches ``^nccl.*Kernel``, memory if ``^Memcpy``,
  ``^Memset`` or ``^dma``, nothing of these if it holds ``Memcpy`` or ``Sync`` or begins with
  ``Memset``, and computation otherwise;
- synchronization records on a stream count as busy time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import NULL_NS, Columns
from ddltrace.analyzer.formatting.text_table import render
from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.tracer.errors import UsageError

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_COMMUNICATION: Final = re.compile(r"nccl.*Kernel")
_MEMORY: Final = re.compile(r"Memcpy|Memset|dma")
_NOT_COMPUTATION: Final = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")
_DEVICE_LANE: Final = re.compile(r"(?:sync/)?stream-\d+(?:@.*)?\Z")

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HtaBreakdown:
    """Results of HTA's ``get_comm_comp_overlap`` and ``get_temporal_breakdown`` for one rank.

    Attributes:
        rank: Global rank.
        overlap_percent: 100 |communication n computation| / |communication|; None without
            communication.
        idle_us: Time without any device work, between the first start and the last end.
        compute_us: Union of computation.
        kernel_time_us: From the first start of device work to its last end.
    """

    rank: int
    overlap_percent: float | None
    idle_us: float
    compute_us: float
    kernel_time_us: float

    @property
    def non_compute_us(self) -> float:
        """Time that is neither idle nor computation."""
        return self.kernel_time_us - self.compute_us - self.idle_us


def hta_breakdown(trace: Trace) -> list[HtaBreakdown]:
    """Computes HTA's overlap and temporal breakdown of every rank with device work.

    Args:
        trace: A trace imported from Kineto files.

    Returns:
        One entry per rank that has device work in the window that HTA looks at.

    Raises:
        UsageError: The trace was not read from Kineto files.
    """
    if trace.run.source != "kineto":
        raise UsageError(
            f"{trace.name} is no trace of torch.profiler (Kineto), which HTA's definitions are "
            "for: leave out --definitions hta"
        )
    base = trace.run.labels.get("kineto_base_ns", 0)
    base_ns = base if isinstance(base, int) else 0
    columns = {rank: trace.columns(rank) for rank in trace.ranks}
    steps = {int(step) for each in columns.values() for step in each.step[each.rows("step")]}
    found = [_of_rank(rank, each, base_ns, len(steps) > 1) for rank, each in columns.items()]
    return [breakdown for breakdown in found if breakdown is not None]


def by_hta(document: dict[str, Any], breakdown: list[HtaBreakdown]) -> dict[str, Any]:
    """The object of ``analyze --json`` with HTA's values in the ranks' rows.

    Args:
        document: The result of `ddltrace.analyzer.model.Analysis.to_json`.
        breakdown: HTA's values; a rank that has none gets null.
    """
    found = {each.rank: each for each in breakdown}
    rows = [row | _json_values(found.get(row["rank"])) for row in document["ranks"]]
    return document | {"definitions": "hta", "ranks": rows}


def _json_values(values: HtaBreakdown | None) -> dict[str, float | None]:
    if values is None:
        return dict.fromkeys(("overlap_ratio", "idle_us", "compute_us", "span_us"))
    overlap = values.overlap_percent
    return {
        "overlap_ratio": None if overlap is None else overlap / 100,
        "idle_us": values.idle_us,
        "compute_us": values.compute_us,
        "span_us": values.kernel_time_us,
    }


def render_breakdown(breakdown: list[HtaBreakdown]) -> str:
    """A table of HTA's values, in its own units."""
    title = "Ranks by the definitions of HTA 0.5.0 (all that stands above is by ours)"
    if not breakdown:
        return f"{title}\n  no rank has device work in the window that HTA looks at"
    header = ["rank", "overlap %", "idle us", "compute us", "kernel_time us"]
    rows = [
        [
            str(each.rank),
            NOT_KNOWN if each.overlap_percent is None else f"{each.overlap_percent:.2f}",
            f"{each.idle_us:.0f}",
            f"{each.compute_us:.0f}",
            f"{each.kernel_time_us:.0f}",
        ]
        for each in breakdown
    ]
    return "\n".join([title, *render(header, rows)])


def _of_rank(rank: int, events: Columns, base_ns: int, drop_last_step: bool) -> HtaBreakdown | None:
    on_device = [_DEVICE_LANE.match(lane) is not None for lane in events.lanes]
    rows = np.flatnonzero(np.array([*on_device, False])[events.lane])
    if drop_last_step:
        rows = rows[_launched_before_last_step(events, rows, base_ns)]
    if not len(rows):
        return None
    # HTA's files of whole microseconds stay as they are; fractions are rounded inwards.
    starts = _rounded_up(events.start[rows] - base_ns)
    ends = (events.end[rows] - base_ns) // 1000
    names = events.name[rows]
    is_communication = [_COMMUNICATION.match(name) is not None for name in events.names]
    communication = np.array([*is_communication, False])[names]
    computation = np.array([*map(_is_computation, events.names), False])[names]
    busy_start, busy_end = _union(starts, ends)
    kernel_time = float(busy_end[-1] - busy_start[0])
    comm = _union(starts[communication], ends[communication])
    comp = _union(starts[computation], ends[computation])
    comm_us = float((comm[1] - comm[0]).sum())
    return HtaBreakdown(
        rank=rank,
        overlap_percent=100 * _overlap(comm, comp) / comm_us if comm_us else None,
        idle_us=kernel_time - float((busy_end - busy_start).sum()),
        compute_us=float((comp[1] - comp[0]).sum()),
        kernel_time_us=kernel_time,
    )


def _is_computation(name: str) -> bool:
    return not (_COMMUNICATION.match(name) or _MEMORY.match(name) or _NOT_COMPUTATION.match(name))


def _launched_before_last_step(
    events: Columns, rows: Integers, base_ns: int
) -> npt.NDArray[np.bool_]:
    steps = events.rows("step")
    if not len(steps):
        return np.zeros(len(rows), dtype=bool)
    last = _rounded_up(events.start[steps] - base_ns).max()
    launch = events.ints("enqueue_ns", null=NULL_NS)[rows]
    known = launch != NULL_NS
    before: npt.NDArray[np.bool_] = known & (_rounded_up(launch - base_ns) < last)
    return before


def _rounded_up(nanoseconds: Integers) -> Integers:
    return -(-nanoseconds // 1000)


def _union(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Merges intervals that overlap or touch.

    Rounding inwards can leave an interval with an end before its start; like HTA, this keeps
    such a one, with its negative length, where nothing else covers it.
    """
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.r_[True, starts[1:] > reach[:-1]])
    return starts[first], np.maximum.reduceat(ends, first)


def _overlap(left: tuple[Integers, Integers], right: tuple[Integers, Integers]) -> float:
    """Length of the intersection of two unions, by a sweep over all their edges."""
    times = np.concatenate([*left, *right])
    change = np.repeat([1, -1, 2, -2], [len(left[0])] * 2 + [len(right[0])] * 2)
    order = np.argsort(times, kind="stable")
    both = np.flatnonzero(np.cumsum(change[order]) == 3)
    both = both[both + 1 < len(times)]
    times = times[order]
    return float((times[both + 1] - times[both]).sum())
