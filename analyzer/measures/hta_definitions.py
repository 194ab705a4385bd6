"""The figures of each rank by the definitions of Holistic Trace Analysis (HTA) 0.5.0.

They are computed from an imported Kineto trace with the same operations as our own measures, and
agree with HTA's within 0.05 percentage points, times within 0.05 %. HTA's definitions:

- Device work is what ran on a stream: kernels, copies and synchronization records.
- If the job's files mark several profiler steps, the last one is dropped: work counts if the call
  that launched it is in the file and began before that step.
- If a file writes starts with fractions of microseconds, starts are rounded up and ends down.
- A kernel is communication if its name matches ``^nccl.*Kernel``, memory if ``^Memcpy``,
  ``^Memset`` or ``^dma``, nothing of these if it holds ``Memcpy`` or ``Sync`` or begins with
  ``Memset``, and computation otherwise.
- Work whose launch is not in the file counts as launched when the first event of the file began.
  Queues count works that a launching call of CUDA or HIP launched.
- The bandwidth of a copy is what Kineto wrote, else bytes divided by the duration. Bandwidths of
  copies of one kind that run at the same time are added.

Where rounding ends work before it starts, its length is 0 here, and may be -1 us in HTA. Changes of
a queue in the same microsecond are in no defined order in HTA; here, launches come first.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.copies import BANDWIDTHS_LABEL, kineto_direction
from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    BoolArray,
    Columns,
    FloatArray,
    IntArray,
    named,
    places_by_value,
)
from ddltrace.analyzer.events.interval_sets import intersect, length, union
from ddltrace.analyzer.events.launches import launches_of
from ddltrace.analyzer.formatting.terminal import Section, TextTable, more
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable
from ddltrace.analyzer.joined.executions import device_rows
from ddltrace.analyzer.measures.device_queues import queues_of, stream_gaps
from ddltrace.tracer.errors import TraceError, UsageError
from ddltrace.tracer.trace.schema import EVENTS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

AGREEMENT: Final = "they agree with HTA's within 0.05 percentage points, times within 0.05 %"

_US: Final = 1000
_QUARTER: Final = 250
_READ: Final = ("start_ns", "end_ns", "enqueue_ns", "kind", "name", "lane", "bytes")
_STEP: Final = "ProfilerStep"
_STREAM: Final = re.compile(r"(?:sync/)?stream-(\d{1,9})(?:@.*)?")
_COMMUNICATION: Final = re.compile(r"nccl.*Kernel")
_NOT_COMPUTATION: Final = re.compile(r"nccl.*Kernel|dma|.*Memcpy|Memset|.*Sync")
_DESCRIBED: Final = ("count", "mean", "std", "min", "p25", "p50", "p75", "max")
_MAX_ROWS: Final = 32


class HtaBreakdown(NamedTuple):
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


class Series(NamedTuple):
    """A step function: each value holds until the next time.

    Attributes:
        time_ns: On the clock of the file.
        value: From then on.
    """

    time_ns: IntArray
    value: IntArray | FloatArray


class HtaRank(NamedTuple):
    """All figures of one rank.

    Attributes:
        rank: Global rank.
        first_ns: When the first event of the file begins, on its clock.
        breakdown: None for a rank without device work before the last step.
        idle_time: Rows of `HtaTables.idle_time`.
        queues: Stream -> works launched and not begun.
        bandwidths: Kind of copy -> bandwidth, GB/s.
    """

    rank: int
    first_ns: int
    breakdown: HtaBreakdown | None
    idle_time: list[dict[str, Any]]
    queues: dict[int, Series]
    bandwidths: dict[str, Series]


class HtaTables(NamedTuple):
    """HTA's tables of streams and copies, over all ranks; rows as in the JSON output.

    Attributes:
        idle_time: Idle time of each stream by cause, microseconds (``get_idle_time_breakdown``).
        queue_length: Works launched and not begun on each stream (``get_queue_length_summary``).
        memory_bandwidth: Bandwidth by kind of copy, GB/s (``get_memory_bw_summary``).
    """

    idle_time: list[dict[str, Any]]
    queue_length: list[dict[str, Any]]
    memory_bandwidth: list[dict[str, Any]]


def hta_ranks(trace: Trace) -> list[HtaRank]:
    """Computes the figures of every rank.

    Args:
        trace: A trace imported from Kineto files. HTA reads one file of each rank; here, all files
            of a rank count.

    Raises:
        UsageError: The trace was not read from Kineto files.
        TraceError: The trace is damaged.
    """
    if trace.run.source != "kineto":
        raise UsageError(
            f"{trace.name} is not a trace of torch.profiler (Kineto), which HTA's definitions are "
            "for: leave out --definitions hta"
        )
    steps = {name for names in trace.map_ranks(_step_names, "reading steps") for name in names}
    task = partial(_of_rank, drops_last=len(steps) > 1)
    return list(trace.map_ranks(task, "computing HTA's figures", one_at_a_time=True))


def hta_tables(ranks: list[HtaRank]) -> HtaTables:
    """HTA's tables of streams and copies."""
    found = HtaTables([], [], [])
    for each in ranks:
        found.idle_time.extend(each.idle_time)
        for stream, series in each.queues.items():
            found.queue_length.append(
                {"rank": each.rank, "stream": stream, **_described(series.value)}
            )
        for name, series in each.bandwidths.items():
            if (copying := series.value[series.value > 0]).size:
                found.memory_bandwidth.append(
                    {"rank": each.rank, "name": name, **_described(copying)}
                )
    return found


def by_hta(document: dict[str, Any], ranks: list[HtaRank]) -> dict[str, Any]:
    """The object of ``analyze --json`` with the values by HTA's definitions in the ranks' rows.

    Args:
        document: The result of `ddltrace.analyzer.model.Analysis.to_json`.
        ranks: The figures. A rank without device work gets null; the tables become ``hta``.
    """
    found = {each.rank: _json_values(each.breakdown) for each in ranks}
    rows = [row | found[row["rank"]] for row in document["ranks"]]
    return document | {"definitions": "hta", "ranks": rows, "hta": hta_tables(ranks)._asdict()}


def _step_names(trace: Trace) -> set[str]:
    """The distinct names of profiler steps on a rank."""
    (rank,) = trace.ranks
    names: set[str] = set()
    for info in trace.infos(rank):
        for batch in trace.read_columns(info, ["name"]):
            column = batch.column(0)
            used = set(column.indices.unique().to_pylist())
            listed = enumerate(column.dictionary.to_pylist())
            names.update(name for code, name in listed if _STEP in name and code in used)
    return names


def _of_rank(trace: Trace, drops_last: bool) -> HtaRank:
    """The figures of a trace of one rank, whose last step may be dropped."""
    (rank,) = trace.ranks
    # As stored: rounding depends on the times that stand in the file.
    batches = [one for info in trace.infos(rank) for one in trace.read_columns(info, _READ)]
    columns = Columns(
        pa.Table.from_batches(batches).unify_dictionaries() if batches else EVENTS.empty_table()
    )
    if not len(columns):
        return HtaRank(rank, 0, None, [], {}, {})
    launched = columns.ints("enqueue_ns", null=NULL_NS)
    is_launched = launched != NULL_NS
    start, end = columns.start, columns.end
    if np.any(start % _US):
        start, launched = ((times + _US - 1) // _US * _US for times in (start, launched))
        if not np.any(columns.start % _QUARTER):
            # Times of day as floats of microseconds, whose steps are 0.25: so are HTA's sums.
            end = (end + _QUARTER // 2) // _QUARTER * _QUARTER
        end = np.maximum(end // _US * _US, start)
    matches = [_STREAM.fullmatch(lane) for lane in columns.lanes]
    numbers = [NULL if match is None else int(match[1]) for match in matches]
    stream = np.array([*numbers, NULL])[columns.lane]
    kept = (stream != NULL) & (columns.end != NULL_NS)
    if drops_last:
        marks = named(columns, lambda name: _STEP in name) & (stream == NULL)
        kept &= is_launched & (launched < start[marks].max(initial=NULL_NS))
    work = device_rows(columns)
    work = work[kept[work]]
    # HTA takes a missing launch for the first event of the file.
    launched = np.where(is_launched, launched, start[0])
    idle = []
    for number, places in places_by_value(stream[work]):
        mine = work[places]
        gaps = stream_gaps(start[mine], end[mine], launched[mine])
        causes = ("host_wait_us", "kernel_wait_us", "other_us")
        idle.append({"rank": rank, "stream": number, **dict(zip(causes, gaps, strict=True))})
    queues = queues_of(columns, work, launches_of(columns)[work], start, stream)
    return HtaRank(
        rank=rank,
        first_ns=int(start.min()),
        breakdown=_breakdown(rank, columns, kept, start, end) if kept.any() else None,
        idle_time=idle,
        queues={number: Series(*series) for number, series in queues},
        bandwidths=_bandwidths(trace, columns, kept, start, end),
    )


def _breakdown(
    rank: int, columns: Columns, kept: BoolArray, start: IntArray, end: IntArray
) -> HtaBreakdown:
    is_comm = named(columns, _COMMUNICATION.match)
    is_comp = named(columns, lambda name: _NOT_COMPUTATION.match(name) is None)
    busy, comm, comp = (
        union(start[rows], end[rows]) for rows in (kept, kept & is_comm, kept & is_comp)
    )
    comm_ns = length(comm)
    kernel_time = int(end[kept].max() - start[kept].min())
    return HtaBreakdown(
        rank=rank,
        overlap_percent=100 * length(intersect(comm, comp)) / comm_ns if comm_ns else None,
        idle_us=(kernel_time - length(busy)) / 1e3,
        compute_us=length(comp) / 1e3,
        kernel_time_us=kernel_time / 1e3,
    )


def _bandwidths(
    trace: Trace, columns: Columns, kept: BoolArray, start: IntArray, end: IntArray
) -> dict[str, Series]:
    copies = columns.rows("copy")
    bandwidth = _bandwidth_of_copies(trace, columns, copies)[kept[copies]]
    copies = copies[kept[copies]]
    times = np.concatenate([start[copies], np.maximum(end[copies], start[copies] + _US)])
    change = np.concatenate([bandwidth, -bandwidth])
    order = np.lexsort((change, times))
    times, change = times[order], change[order]
    kinds = [kineto_direction(name, "Memcpy Unknown") for name in columns.names]
    names = sorted(set(kinds))
    kind = np.array([*map(names.index, kinds), NULL])[columns.name[copies]]
    return {
        names[code]: Series(times[mine], np.cumsum(change[mine]))
        for code, mine in places_by_value(np.tile(kind, 2)[order])
    }


def _bandwidth_of_copies(trace: Trace, columns: Columns, copies: IntArray) -> FloatArray:
    """GB/s of each copy, as Kineto wrote it; computed where that gives the same."""
    (rank,) = trace.ranks
    label = trace.run.labels.get(BANDWIDTHS_LABEL)
    stated = label.get(str(rank)) if isinstance(label, dict) else None
    if stated is None:
        duration = np.maximum(columns.end[copies] - columns.start[copies], 1)
        computed: FloatArray = np.maximum(columns.ints("bytes")[copies], 0) / duration
        return computed
    try:
        found = np.array(stated, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.shape != copies.shape or not np.isfinite(found).all():
        raise TraceError(
            "run.json is damaged: the bandwidths of copies cannot be read; import the Kineto "
            "files again"
        )
    return found


def _described(values: FloatArray) -> dict[str, float | None]:
    """Statistics of some values; the standard deviation of one value is None."""
    spread = float(values.std(ddof=1)) if len(values) > 1 else None
    quartiles = np.percentile(values, [0, 25, 50, 75, 100]).tolist()
    return dict(
        zip(_DESCRIBED, [float(len(values)), float(values.mean()), spread, *quartiles], strict=True)
    )


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


def hta_sections(ranks: list[HtaRank]) -> list[Section]:
    """The figures as tables, in HTA's units."""
    title = f"Ranks by the definitions of HTA 0.5.0 ({AGREEMENT}; all that stands above is by ours)"
    header = ["rank", "overlap %", "idle us", "compute us", "kernel_time us"]
    rows = [
        [
            str(found.rank),
            NOT_KNOWN if found.overlap_percent is None else f"{found.overlap_percent:.2f}",
            *(f"{value:.0f}" for value in found[2:]),
        ]
        for found in (each.breakdown for each in ranks)
        if found is not None
    ]
    if not rows:
        return [[title, "  no rank has device work in the window that HTA looks at"]]
    shown: list[Section] = [[title, TextTable(header, rows)]]
    tables = hta_tables(ranks)
    for title, header, found in (
        (
            "Idle time of streams (us), by HTA",
            ["rank", "stream", "host wait", "kernel wait", "other"],
            [[f"{value:.0f}" for value in row.values()] for row in tables.idle_time],
        ),
        (
            "Works launched and not begun, by HTA",
            ["rank", "stream", *_DESCRIBED],
            [[_number(value) for value in row.values()] for row in tables.queue_length],
        ),
        (
            "Bandwidth of copies (GB/s), by HTA",
            ["rank", "copy", *_DESCRIBED],
            [[_number(value) for value in row.values()] for row in tables.memory_bandwidth],
        ),
    ):
        if found:
            table = TextTable(header, found[:_MAX_ROWS], keys=2)
            shown.append([title, table, *more(len(found), _MAX_ROWS)])
    return shown


def _number(value: Any) -> str:
    if value is None:
        return NOT_KNOWN
    if isinstance(value, str):
        return printable(value)
    return f"{value:.4g}"
