"""Processor, memory and device use of each rank, from its resource counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.counter_series import CounterSeries, counter_series
from ddltrace.analyzer.events.process_stops import READ_EVERY_NS, stops_between_readings
from ddltrace.analyzer.measures.measure import derived

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

Floats = npt.NDArray[np.float64]

_WARM_UP: Final = 1 / 3
"""Share of the samples that is left out: caches fill and buffers are made at the start."""

_MIN_SAMPLES: Final = 8
_MAX_POINTS: Final = 200
_SURE: Final = 3.0
"""Standard deviations by which the trend must exceed chance: one in a thousand series."""

_MIN_GROWTH_BYTES: Final = 8 << 20
_MIN_GROWTH: Final = 0.02
_STILL_GROWING: Final = 0.3
_BUSY: Final = 0.95
_THROTTLING: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
}
"""NVML's bits of reasons that cost speed, of
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html. The others (idle device,
clocks set by an application, synchronized boost) are wanted."""

_GROWING: Final = ("process_memory", "device_allocated_peak")


@dataclass(frozen=True)
class MemoryGrowth:
    """Memory that grows from step to step.

    Attributes:
        counter: The counter, such as ``process_memory``.
        bytes_per_step: Median slope.
        first_step: First examined step, after the warm-up.
        last_step: Last one.
        bytes: Growth between these steps, by the slope.
    """

    counter: str
    bytes_per_step: float
    first_step: int
    last_step: int
    bytes: float


@dataclass(frozen=True)
class Stop:
    """A time in which no thread of a process ran, although its counters were due every second.

    Attributes:
        last_step: The step in which the process was when it ran again; null outside of steps.
        least_us: From the first reading that was due and missing to the next reading.
        most_us: From the last reading before to the next one.
    """

    last_step: int | None
    least_us: float
    most_us: float


@dataclass(frozen=True)
class ResourceRow:
    """Resource use of one rank in its steps, from its resource counters; null if it was not
    recorded.

    Attributes:
        rank: Global rank.
        host: Its host.
        cpu_cores: Processor time of the process per second, mean.
        cpu_wait_share: Share of time in which the main thread waited for a processor, mean.
        memory_bytes: Largest resident memory of the process.
        host_cpu_share: Busy share of the host's processors, mean.
        host_busy_share: Share of samples in which at least 95 % of them were busy.
        host_memory_share: Largest used share of the host's memory.
        device_utilization: Share of time in which a kernel ran on the device, mean.
        device_memory_bytes: Largest memory of the device in use, by all processes.
        device_allocated_bytes: Largest peak of PyTorch's allocated memory in a step.
        device_reserved_bytes: Largest peak of its reserved memory.
        device_power_w: Power draw, mean, in watts.
        device_temperature_c: Largest temperature in degrees Celsius.
        device_throttled_share: Share of samples in which the device's clock was reduced because
            of power or heat.
        device_throttling: The reasons.
        growth: Memory that grows from step to step.
        stops: When no thread of the process ran; null if the counters cannot show it, or if the
            rank had several processes.
    """

    rank: int
    host: str
    cpu_cores: float | None
    cpu_wait_share: float | None
    memory_bytes: float | None
    host_cpu_share: float | None
    host_busy_share: float | None
    host_memory_share: float | None
    device_utilization: float | None
    device_memory_bytes: float | None
    device_allocated_bytes: float | None
    device_reserved_bytes: float | None
    device_power_w: float | None
    device_temperature_c: float | None
    device_throttled_share: float | None
    device_throttling: tuple[str, ...]
    growth: tuple[MemoryGrowth, ...]
    stops: tuple[Stop, ...] | None = None


def resource_rows(trace: Trace) -> tuple[ResourceRow, ...]:
    """One row per rank with counters, in the steps of the rank; all samples if it has no steps."""
    found = []
    host_rows: dict[str, dict[str, CounterSeries]] = {}
    ranks = [rank for rank in trace.ranks if trace.has_counters(rank)]
    found_series = trace.map_ranks(_series, "reading counters", ranks)
    series_of = dict(zip(ranks, found_series, strict=True))
    hosts = {rank: trace.infos(rank)[-1].host for rank in ranks}
    for rank, series in series_of.items():
        for one in series:
            if one.name.startswith("host_"):
                host_rows.setdefault(hosts[rank], {}).setdefault(one.name, one)
    for rank, series in series_of.items():
        if series:
            named = {one.name: one for one in series}
            row = _row(rank, hosts[rank], host_rows.get(hosts[rank], {}) | named)
            # Between two processes of a rank no counters are read.
            stops = find_stops(named) if len(trace.infos(rank)) == 1 else None
            found.append(replace(row, stops=stops))
    return tuple(found)


def _series(trace: Trace) -> list[CounterSeries]:
    """The counters of a trace of one rank."""
    (rank,) = trace.ranks
    return counter_series(trace.counters(rank))


def _row(rank: int, host: str, series: dict[str, CounterSeries]) -> ResourceRow:
    def values(name: str) -> Floats:
        one = series.get(name)
        if one is None:
            return np.empty(0)
        in_steps = one.value[one.step >= 0]
        return in_steps if len(in_steps) else one.value

    def mean(name: str) -> float | None:
        found = values(name)
        return float(found.mean()) if len(found) else None

    def largest(name: str) -> float | None:
        found = values(name)
        return float(found.max()) if len(found) else None

    busy = values("host_cpu")
    total = largest("host_memory_total")
    used = largest("host_memory_used")
    throttling = values("device_throttling").astype(np.int64)
    harmful = throttling & sum(_THROTTLING)
    reasons = [text for bit, text in _THROTTLING.items() if (harmful & bit).any()]
    return ResourceRow(
        rank=rank,
        host=host,
        cpu_cores=mean("process_cpu"),
        cpu_wait_share=mean("process_cpu_wait"),
        memory_bytes=largest("process_memory"),
        host_cpu_share=mean("host_cpu"),
        host_busy_share=float((busy >= _BUSY).mean()) if len(busy) else None,
        host_memory_share=None if not total or used is None else used / total,
        device_utilization=mean("device_utilization"),
        device_memory_bytes=largest("device_memory_used"),
        device_allocated_bytes=largest("device_allocated_peak"),
        device_reserved_bytes=largest("device_reserved_peak"),
        device_power_w=mean("device_power"),
        device_temperature_c=largest("device_temperature"),
        device_throttled_share=float((harmful != 0).mean()) if len(harmful) else None,
        device_throttling=tuple(reasons),
        growth=tuple(
            growth
            for name in _GROWING
            if name in series and (growth := memory_growth(series[name])) is not None
        ),
    )


def find_stops(series: Mapping[str, CounterSeries]) -> tuple[Stop, ...] | None:
    """The stops of a process, see `ddltrace.analyzer.events.process_stops`.

    Args:
        series: The counters of one process by name.

    Returns:
        The stops; None if a counter that shows it was not recorded.
    """
    rows = stops_between_readings(series)
    if rows is None:
        return None
    cpu = series["process_cpu"]
    gaps = np.diff(cpu.time_ns)
    return tuple(
        Stop(
            last_step=None if cpu.step[row] < 0 else int(cpu.step[row]),
            least_us=float(gaps[row - 1] - READ_EVERY_NS) / 1e3,
            most_us=float(gaps[row - 1]) / 1e3,
        )
        for row in rows.tolist()
    )


def memory_growth(series: CounterSeries) -> MemoryGrowth | None:
    """The steady growth of a counter of memory over steps; None if it does not grow steadily.

    The slope is Theil's and Sen's: the median of the slopes between all pairs of samples, which
    single peaks do not change (P. K. Sen, Journal of the American Statistical Association 63,
    1968). The growth counts if Kendall's rank correlation exceeds chance, if it continues in the
    second half, and if it is more than 8 MB and 2 % of the memory. The first third of the samples
    is left out.

    Args:
        series: A counter in bytes.
    """
    inside = series.step >= 0
    step, value = series.step[inside], series.value[inside]
    first = int(np.ceil(len(step) * _WARM_UP))
    step, value = step[first:], value[first:]
    if len(step) > _MAX_POINTS:
        kept = np.linspace(0, len(step) - 1, _MAX_POINTS).round().astype(np.int64)
        step, value = step[kept], value[kept]
    if len(step) < _MIN_SAMPLES or step[-1] == step[0]:
        return None
    slope = _slope(step, value)
    steps = int(step[-1] - step[0])
    growth = slope * steps
    half = len(step) // 2
    if (
        growth < max(_MIN_GROWTH_BYTES, _MIN_GROWTH * float(np.median(value)))
        or _trend(value) < _SURE
        or _slope(step[half:], value[half:]) < _STILL_GROWING * slope
    ):
        return None
    return MemoryGrowth(series.name, slope, int(step[0]), int(step[-1]), growth)


def _slope(step: npt.NDArray[np.int64], value: Floats) -> float:
    """The median slope between pairs of samples of different steps; 0 without any."""
    i, j = np.triu_indices(len(step), 1)
    apart = step[j] != step[i]
    i, j = i[apart], j[apart]
    return float(np.median((value[j] - value[i]) / (step[j] - step[i]))) if len(i) else 0.0


def _trend(value: Floats) -> float:
    """Kendall's S of the values over their order, in standard deviations of chance.

    Without correction for ties, which lowers the result (M. G. Kendall, Rank Correlation Methods).
    """
    n = len(value)
    i, j = np.triu_indices(n, 1)
    score = float(np.sign(value[j] - value[i]).sum())
    return score / float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def worst_throttled(rows: Sequence[ResourceRow]) -> ResourceRow | None:
    """The rank whose device was throttled in most samples; None if none was."""
    throttled = [row for row in rows if row.device_throttled_share]
    return max(throttled, key=lambda row: row.device_throttled_share or 0.0, default=None)


RESOURCES: Final = derived("resources", lambda whole: resource_rows(whole.trace))
