"""Launches, queues, gaps and copies of each rank's device, as in Holistic Trace Analysis.

Checked against its release 0.5.0: ``get_cuda_kernel_launch_stats``, ``get_queue_length_summary``,
``get_idle_time_breakdown`` and ``get_memory_bw_summary``. The last one reads bandwidths that Kineto
computed from durations in nanoseconds; this module divides bytes by the duration in the file. HTA
drops the last of several profiler steps; this module does not, but ``analyze --definitions hta``
does. HTA has no measure like `LaunchGaps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.copies import kineto_direction
from ddltrace.analyzer.events.event_columns import (
    KIND,
    NULL,
    NULL_NS,
    Columns,
    IntArray,
    distinct,
    named,
    places_by_value,
)
from ddltrace.analyzer.events.interval_sets import intersect, length, union
from ddltrace.analyzer.events.launches import launches_of
from ddltrace.analyzer.formatting.units import NOT_KNOWN
from ddltrace.analyzer.joined.executions import device_rows
from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.measure import (
    JoinedSteps,
    Measure,
    Table,
    Whole,
    derived,
    merged_by,
)
from ddltrace.analyzer.measures.operation_rows import KERNELS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_SLOW_CALL_NS: Final = 50_000
_LONG_DELAY_NS: Final = 100_000
_KERNEL_WAIT_NS: Final = 30_000
_QUEUED: Final = frozenset(
    {
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "runFunction - job_prep_and_submit_for_execution",
        "hipLaunchKernel",
        "hipExtModuleLaunchKernel",
        "hipMemcpyAsync",
        "hipMemsetAsync",
        "hipMemcpyWithStream",
    }
)
"""The calls whose work counts in queues."""


@dataclass(frozen=True)
class LaunchRow:
    """How one rank's host launched its device work, with the limits of Holistic Trace Analysis.

    Attributes:
        rank: Global rank.
        launches: Kernels and copies whose launching call is known.
        short_kernels: Launches whose work took less time than the call, among calls of up to 50 us.
        slow_calls: Launches whose call took more than 50 us.
        long_delays: Launches whose work began more than 100 us after the call.
        call_us: Mean time of a call.
        call_us_p95: 95th percentile.
        delay_us: Mean time from the end of the call to the start of the work, at least 0.
        delay_us_p50: Median.
        delay_us_p95: 95th percentile.
    """

    rank: int
    launches: int
    short_kernels: int
    slow_calls: int
    long_delays: int
    call_us: float
    call_us_p95: float
    delay_us: float
    delay_us_p50: float
    delay_us_p95: float


@dataclass(frozen=True)
class DeviceStepRow:
    """One step of one rank on its device's time: the work that the host launched in the step.

    Where the host runs ahead, that work runs while the host is in later steps. Work whose launch
    was not recorded, such as that launched before the recording began, is of no step here.

    Attributes:
        rank: Global rank.
        step: Number of the step in which the host launched the work.
        lag_us: From the launch of its first work to the begin of that work.
        period_us: From the begin of its first work to that of the next step; null for the last.
        compute_us: Union of its kernels.
        comm_us: Union of its messages.
        overlap_us: Time in both.
        copy_us: Union of its copies.
    """

    rank: int
    step: int
    lag_us: float
    period_us: float | None
    compute_us: float
    comm_us: float
    overlap_us: float
    copy_us: float


@dataclass(frozen=True)
class StreamRow:
    """One stream of one rank: causes of its idle time, and the length of its queue.

    Definitions are those of Holistic Trace Analysis 0.5.0, over all steps; `IdleRow` has ours.

    Attributes:
        rank: Global rank.
        stream: Its lane.
        works: Number of kernels and copies.
        busy_us: Sum of their durations.
        host_wait_us: Gaps before works that were launched after the end of the work before. Works
            whose launch is not recorded count, as in HTA, as launched when the first event of the
            file began.
        kernel_wait_us: Other gaps shorter than 30 us.
        other_us: All other gaps.
        queue_mean: Works launched and not begun, mean over all changes of their number; None
            without known launches.
        queue_max: Maximum of the same number.
    """

    rank: int
    stream: str
    works: int
    busy_us: float
    host_wait_us: float
    kernel_wait_us: float
    other_us: float
    queue_mean: float | None
    queue_max: int | None


@dataclass(frozen=True)
class CopyRow:
    """Copies and fills on one rank's device in one direction.

    Attributes:
        rank: Global rank.
        direction: Start of their name, such as ``Memcpy HtoD``, or ``Memset``.
        count: Number of copies.
        bytes: Sum of their sizes, where known.
        total_us: Sum of their durations.
        gbps: Bytes divided by time, over copies of known size; None if there are none.
        mean_gbps: Mean bandwidth of a copy.
        max_gbps: The highest bandwidth of a copy.
    """

    rank: int
    direction: str
    count: int
    bytes: int
    total_us: float
    gbps: float | None
    mean_gbps: float | None
    max_gbps: float | None


class DeviceQueues(NamedTuple):
    """The rows of all ranks."""

    launches: tuple[LaunchRow, ...] = ()
    streams: tuple[StreamRow, ...] = ()
    copies: tuple[CopyRow, ...] = ()
    device_steps: tuple[DeviceStepRow, ...] = ()


def device_queues(joined: JoinedSteps) -> DeviceQueues:
    """Measures launches, queues, gaps and copies of every rank with device work.

    Of a trace too long to be held, nothing is measured: gaps and queues need all events of a stream
    at once.
    """
    trace = joined.trace
    launches: list[LaunchRow] = []
    streams: list[StreamRow] = []
    copies: list[CopyRow] = []
    device_steps: list[DeviceStepRow] = []
    whole = trace.run.level == "op" and trace.step_selection is None
    task = partial(_of_rank, steps=joined.wanted)
    doing = "measuring device queues"
    for found in trace.map_ranks(task, doing, one_at_a_time=True) if whole else ():
        launches += found.launches
        streams += found.streams
        copies += found.copies
        device_steps += found.device_steps
    return DeviceQueues(tuple(launches), tuple(streams), tuple(copies), tuple(device_steps))


def _of_rank(trace: Trace, steps: IntArray | None) -> DeviceQueues:
    """The rows of a trace of one rank; see `device_queues`."""
    (rank,) = trace.ranks
    columns = Columns(pa.concat_tables(list(trace.windows(rank))).unify_dictionaries())
    work = device_rows(columns)
    if steps is not None:
        work = work[np.isin(columns.step[work], steps)]
    if not len(work):
        return DeviceQueues()
    call = launches_of(columns)[work]
    launched = call != NULL
    launches = (
        (_launch_row(rank, columns, work[launched], call[launched]),) if launched.any() else ()
    )
    streams = _stream_rows(rank, columns, work, call)
    copies = _copy_rows(rank, columns, work[columns.kind[work] == KIND["copy"]])
    device_steps = _device_step_rows(rank, columns, work)
    return DeviceQueues(launches, tuple(streams), tuple(copies), tuple(device_steps))


def _launch_row(rank: int, columns: Columns, work: IntArray, call: IntArray) -> LaunchRow:
    host = columns.end[call] - columns.start[call]
    device = columns.end[work] - columns.start[work]
    delay = np.maximum(columns.start[work] - columns.end[call], 0)
    call_p95 = float(np.percentile(host, 95)) / 1e3
    p50, p95 = (np.percentile(delay, [50, 95]) / 1e3).tolist()
    return LaunchRow(
        rank=rank,
        launches=len(work),
        short_kernels=int(((host <= _SLOW_CALL_NS) & (device < host)).sum()),
        slow_calls=int((host > _SLOW_CALL_NS).sum()),
        long_delays=int((delay > _LONG_DELAY_NS).sum()),
        call_us=float(host.mean()) / 1e3,
        call_us_p95=call_p95,
        delay_us=float(delay.mean()) / 1e3,
        delay_us_p50=p50,
        delay_us_p95=p95,
    )


def _device_step_rows(rank: int, columns: Columns, work: IntArray) -> list[DeviceStepRow]:
    """One row per step, of the work whose launch in it is known."""
    enqueued = columns.ints("enqueue_ns", null=NULL_NS)
    work = work[(enqueued[work] != NULL_NS) & (columns.step[work] != NULL)]
    work = work[np.lexsort((columns.start[work], columns.step[work]))]
    numbers, first = np.unique(columns.step[work], return_index=True)
    begins = columns.start[work[first]]
    lags = begins - enqueued[work[first]]
    rows = []
    for place, (step, mine) in enumerate(
        zip(numbers.tolist(), np.split(work, first[1:]), strict=False)
    ):
        next_step = place + 1 < len(numbers) and numbers[place + 1] == step + 1
        compute, comm, copy = (
            union(columns.start[part], columns.end[part])
            for kind in ("kernel", "message", "copy")
            for part in (mine[columns.kind[mine] == KIND[kind]],)
        )
        rows.append(
            DeviceStepRow(
                rank=rank,
                step=step,
                lag_us=float(lags[place]) / 1e3,
                period_us=float(begins[place + 1] - begins[place]) / 1e3 if next_step else None,
                compute_us=length(compute) / 1e3,
                comm_us=length(comm) / 1e3,
                overlap_us=length(intersect(compute, comm)) / 1e3,
                copy_us=length(copy) / 1e3,
            )
        )
    return rows


def _stream_rows(rank: int, columns: Columns, work: IntArray, call: IntArray) -> list[StreamRow]:
    # HTA takes a missing launch for the first event of the file.
    launched = np.where(call == NULL, columns.start[0], columns.start[call])
    queues = dict(queues_of(columns, work, call, columns.start, columns.lane))
    rows = []
    for code, mine in places_by_value(columns.lane[work]):
        start, end = columns.start[work[mine]], columns.end[work[mine]]
        gaps = stream_gaps(start, end, launched[mine])
        _, queue = queues.get(code, (None, None))
        rows.append(
            StreamRow(
                rank=rank,
                stream=columns.lanes[code] if code >= 0 else "",
                works=len(mine),
                busy_us=float((end - start).sum()) / 1e3,
                host_wait_us=gaps.host_us,
                kernel_wait_us=gaps.kernel_us,
                other_us=gaps.other_us,
                queue_mean=None if queue is None else float(queue.mean()),
                queue_max=None if queue is None else int(queue.max()),
            )
        )
    return rows


class Gaps(NamedTuple):
    """Idle time between the works of a stream, as in `StreamRow`."""

    host_us: float
    kernel_us: float
    other_us: float


def stream_gaps(start: IntArray, end: IntArray, launched: IntArray) -> Gaps:
    """Splits the idle time of a stream.

    Args:
        start: Start of each work on the stream, ns.
        launched: Start of the call that launched each.
    """
    order = np.lexsort((end, start))
    former = end[order][:-1]
    gap = start[order][1:] - former
    host = launched[order][1:] > former
    kernel = ~host & (gap < _KERNEL_WAIT_NS)
    return Gaps(*(float(gap[which].sum()) / 1e3 for which in (host, kernel, ~host & ~kernel)))


def queues_of(
    columns: Columns, work: IntArray, call: IntArray, start: IntArray, stream: IntArray
) -> Iterator[tuple[int, tuple[IntArray, IntArray]]]:
    """The queue of each stream; see `queue_lengths`.

    Args:
        columns: The events of a rank.
        work: Rows of its device work.
        call: Rows of the calls that launched them; -1 where not known.
        start: Start of each event, ns.
        stream: The stream of each event.
    """
    counted = np.append(named(columns, _QUEUED.__contains__), False)[call]
    work, call = work[counted], call[counted]
    return queue_lengths(start[call], start[work], stream[work])


def queue_lengths(
    launched: IntArray, start: IntArray, stream: IntArray
) -> Iterator[tuple[int, tuple[IntArray, IntArray]]]:
    """The number of works that are launched and not begun, after each of its changes.

    Args:
        launched: When each work of a rank was launched, ns.
        start: When each began.

    Yields:
        Each stream, ascending, with times and lengths. Launches count before begins of that time.
    """
    times = np.concatenate([launched, start])
    begins = np.arange(len(times)) >= len(launched)
    order = np.lexsort((begins, times))
    times, change = times[order], np.where(begins, -1, 1)[order]
    for number, mine in places_by_value(np.tile(stream, 2)[order]):
        yield number, (times[mine], np.cumsum(change[mine]))


def _copy_rows(rank: int, columns: Columns, work: IntArray) -> list[CopyRow]:
    names = [kineto_direction(name, "other") for name in columns.names]
    rows = []
    for direction in sorted({names[code] for code in distinct(columns.name[work]).tolist()}):
        mine = work[np.array([names[code] == direction for code in columns.name[work].tolist()])]
        size = columns.ints("bytes")[mine]
        duration = columns.end[mine] - columns.start[mine]
        has_both = (size >= 0) & (duration > 0)
        bits = 8 * size[has_both]
        each = bits / duration[has_both]
        rows.append(
            CopyRow(
                rank=rank,
                direction=direction,
                count=len(mine),
                bytes=int(size[size >= 0].sum()),
                total_us=float(duration.sum()) / 1e3,
                gbps=float(bits.sum() / duration[has_both].sum()) if has_both.any() else None,
                mean_gbps=float(each.mean()) if has_both.any() else None,
                max_gbps=float(each.max()) if has_both.any() else None,
            )
        )
    return rows


DEVICE_QUEUES: Final[Measure[DeviceQueues, tuple[LaunchRow, ...]]] = Measure(
    "launches",
    lambda whole: whole.found.of(DEVICE_QUEUES).launches,
    device_queues,
    merged_by(lambda former, _: former),  # nothing: see `device_queues`
    rows=LaunchRow,
    table=Table[LaunchRow](
        "Launches of device work (short: it ran shorter than its call)",
        {
            "rank": "rank",
            "launches": "launches",
            "short": "short_kernels",
            "call > 50 µs": "slow_calls",
            "delay > 100 µs": "long_delays",
            "mean call": "call_us",
            "mean delay": "delay_us",
            "p95 delay": "delay_us_p95",
        },
        most=16,
    ),
)
STREAMS: Final = derived(
    "streams",
    lambda whole: whole.found.of(DEVICE_QUEUES).streams,
    rows=StreamRow,
    table=Table[StreamRow](
        "Idle time of streams and their queues, as HTA defines them",
        {
            "stream": lambda row: f"rank {row.rank}, {row.stream}",
            "works": "works",
            "busy": "busy_us",
            "host wait": "host_wait_us",
            "kernel wait": "kernel_wait_us",
            "other": "other_us",
            "mean queue": "queue_mean",
            "longest": lambda row: NOT_KNOWN if row.queue_max is None else str(row.queue_max),
        },
        order=lambda row: row.works,
    ),
)
COPIES: Final = derived(
    "copies",
    lambda whole: whole.found.of(DEVICE_QUEUES).copies,
    rows=CopyRow,
    table=Table[CopyRow](
        "Copies",
        {
            "copies": lambda row: f"rank {row.rank}, {row.direction}",
            "count": "count",
            "bytes": "bytes",
            "total": "total_us",
            "bandwidth": "gbps",
            "highest": "max_gbps",
        },
        order=lambda row: row.total_us,
    ),
)
DEVICE_STEPS: Final = derived(
    "device_steps", lambda whole: whole.found.of(DEVICE_QUEUES).device_steps
)


_SYNCHRONIZES: Final = re.compile(r"(?:cuda|cu|hip|musa)\w*(?:Stream|Device|Ctx)Synchronize$")
_TO_HOST: Final = "Memcpy DtoH"


@dataclass(frozen=True)
class LaunchGaps:
    """Launches of device work in the steady steps, and the gaps that they leave on the device.

    A launch gap is a time of at most 1 ms in which the device idles for the host's code, which
    prepares the next launch. Values are means over ranks and steps.

    Attributes:
        launches: Kernels, copies and messages launched in a step of one rank.
        launches_per_s: The same per second.
        gap_us: Launch gaps in a step of one rank.
        gap_share: Their share of the time.
        gap_share_of_host: Their share of the time in which a device idles for the host's code
            (`IdleRow.host_us`); null if there is none.
        in_phase_share_of_host: The share of the same time, in gaps of any length, that is inside of
            recorded forward and backward passes and optimizer steps.
        synchronizations: In a step of one rank, calls that wait for the device, such as
            cudaStreamSynchronize, or copies from the device to the host, whichever are more.
    """

    launches: float
    launches_per_s: float
    gap_us: float
    gap_share: float
    gap_share_of_host: float | None
    in_phase_share_of_host: float | None
    synchronizations: float


def _launch_gaps(whole: Whole) -> LaunchGaps | None:
    """Measures launches in steady steps; None without recorded launches in these steps."""
    rank_steps, counted = whole.rank_steps, whole.window
    operators = whole.found.of(KERNELS).operators
    copies = whole.found.of(DEVICE_QUEUES).copies
    launches = float(rank_steps["launches"][counted].sum())
    if not launches:
        return None

    def total(name: str) -> float:
        return float(rank_steps[name][counted].sum())

    number = int(counted.sum())
    wall, host, gap = total("wall_ns"), total("idle_host_ns"), total("launch_gap_ns")
    calls = sum(row.count for row in operators if _SYNCHRONIZES.match(row.name))
    to_host = sum(row.count for row in copies if row.direction == _TO_HOST)
    return LaunchGaps(
        launches=launches / number,
        launches_per_s=launches / wall * 1e9,
        gap_us=gap / number / 1e3,
        gap_share=gap / wall,
        gap_share_of_host=ratio(gap, host),
        in_phase_share_of_host=ratio(total("idle_in_phase_ns"), host),
        synchronizations=max(calls, to_host) / len(rank_steps["step"]),
    )


LAUNCH_GAPS: Final = derived("launch_gaps", _launch_gaps)
