"""Findings from resource counters: memory that grows, throttled devices, busy processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ddltrace.analyzer.events.process_stops import STOPPED
from ddltrace.analyzer.formatting.units import bytes_text, counted, printable, share_text, time_text
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.resources import worst_throttled
from ddltrace.analyzer.model import Analysis

_MIN_THROTTLED: Final = 0.1
_MIN_BUSY: Final = 0.5
_MIN_WAIT: Final = 0.05
_MEMORY_OF: Final = {
    "process_memory": "the memory of its process",
    "device_allocated_peak": "the peak of allocated device memory in a step",
}
_MEMORY_FIXES: Final = {
    "process_memory": (
        "look for objects that live longer than a step: losses kept with their graph (append "
        "loss.item(), not loss), caches without a limit, data loader workers that copy a dataset"
    ),
    "device_allocated_peak": (
        "look for tensors kept from step to step: losses with their graph (append loss.item(), not "
        "loss), outputs in a list; torch.cuda.memory._record_memory_history shows where they "
        "were allocated"
    ),
}


def resource_findings(analysis: Analysis) -> Iterator[Finding]:
    """The findings that resource counters give; of most, the savings are not known."""
    yield from _stopped_processes(analysis)
    yield from _growing_memory(analysis)
    yield from _throttled_device(analysis)
    yield from _busy_hosts(analysis)


def _stopped_processes(analysis: Analysis) -> Iterator[Finding]:
    """One finding: the process that stood still for longest, and how many others did."""
    stopped = [(stop, row.rank) for row in analysis.resources for stop in row.stops or ()]
    if not stopped:
        return
    stop, rank = max(stopped, key=lambda pair: pair[0].least_us)
    others = len({number for _, number in stopped} - {rank})
    more = f"; {others} more rank{'s' if others > 1 else ''} stood still as well" if others else ""
    until = "" if stop.last_step is None else f", until step {stop.last_step}"
    yield _finding(
        "stopped",
        f"no thread of rank {rank} ran for {time_text(stop.least_us)} to "
        f"{time_text(stop.most_us)}{until}: its process used no more processor time than it "
        f"uses in a second, waited for none, and its counters, due every second, are missing{more}",
        "find what stopped the process, or suspended it: SIGSTOP (kill -STOP, a batch system that "
        "preempts), a debugger, a frozen container or virtual machine; or a call that waits "
        "without releasing Python's lock",
        _saved_without_stops(analysis),
        None if analysis.savings is None else analysis.savings.step_us,
    )


def _saved_without_stops(analysis: Analysis) -> float:
    """What a mean step loses by stops on its critical path, µs; 0 where that is not known."""
    stops = [part for part in analysis.critical_path if part.name == STOPPED]
    return sum(part.alone_us for part in stops)


def _growing_memory(analysis: Analysis) -> Iterator[Finding]:
    """One finding per counter: the rank whose memory grows most, and how many others do."""
    for counter, what in _MEMORY_OF.items():
        growing = [
            (growth, row.rank)
            for row in analysis.resources
            for growth in row.growth
            if growth.counter == counter
        ]
        if not growing:
            continue
        growth, rank = max(growing, key=lambda pair: pair[0].bytes_per_step)
        others = "" if len(growing) == 1 else f", and on {len(growing) - 1} other ranks"
        yield _finding(
            "memory",
            f"{what} grows on rank {rank}{others}: by {bytes_text(growth.bytes_per_step)} a step, "
            f"{bytes_text(growth.bytes)} from step {growth.first_step} to {growth.last_step}",
            _MEMORY_FIXES[counter],
        )


def _throttled_device(analysis: Analysis) -> Iterator[Finding]:
    row = worst_throttled(analysis.resources)
    if row is None or (row.device_throttled_share or 0.0) < _MIN_THROTTLED:
        return
    count = sum((r.device_throttled_share or 0.0) >= _MIN_THROTTLED for r in analysis.resources)
    others = "" if count == 1 else f"; {count} ranks are affected"
    yield _finding(
        "device",
        f"the clock of rank {row.rank}'s device was reduced in "
        f"{share_text(row.device_throttled_share or 0.0)} of the samples "
        f"({', '.join(row.device_throttling)}){others}",
        "look at the device's cooling, its power limit (nvidia-smi -q -d POWER,TEMPERATURE) and "
        "what else runs on it",
    )


def _busy_hosts(analysis: Analysis) -> Iterator[Finding]:
    """One finding: the host without a free processor whose ranks wait longest for one."""
    busy = [
        row
        for row in analysis.resources
        if (row.host_busy_share or 0.0) >= _MIN_BUSY
        and (row.cpu_wait_share is None or row.cpu_wait_share >= _MIN_WAIT)
    ]
    if not busy:
        return
    row = max(busy, key=lambda row: row.cpu_wait_share or 0.0)
    others = len({each.host for each in busy}) - 1
    more = f"; {counted(others, 'more host')} had none either" if others else ""
    waits = (
        ""
        if row.cpu_wait_share is None
        else f"; the main thread of rank {row.rank} waited for one during "
        f"{share_text(row.cpu_wait_share)} of the time{_of_step(analysis, row.cpu_wait_share)}"
    )
    yield _finding(
        "processors",
        f"host {printable(row.host)} had no free processor (95 % busy) in "
        f"{share_text(row.host_busy_share or 0.0)} of the samples{waits}{more}; what this costs is "
        "not known, and it makes the other numbers unsure",
        "start fewer threads (OMP_NUM_THREADS, data loader workers) or fewer ranks on such a "
        "host, or move other work off it",
    )


def _of_step(analysis: Analysis, share: float) -> str:
    mean = analysis.summary.step_us.mean
    return "" if mean is None else f" ({time_text(share * mean)} of a mean step)"


def _finding(
    kind: str, evidence: str, advice: str, saves_us: float = 0.0, step_us: float | None = None
) -> Finding:
    return Finding(
        kind=kind,
        saves_us=saves_us,
        share=saves_us / step_us if step_us else 0.0,
        evidence=evidence,
        advice=advice,
        command=None,
        unsure=False,
    )
