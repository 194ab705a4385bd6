"""The quantities of a running job, from an analysis of its last steps."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.measures.throughput import utilization
from ddltrace.analyzer.open_trace import open_trace
from ddltrace.tracer.errors import DdltraceError

if TYPE_CHECKING:
    from ddltrace.analyzer.live.live_state import Alert
    from ddltrace.analyzer.live.live_trace import LiveTrace
    from ddltrace.analyzer.model import Analysis

_SIZES: Final = [
    f"{4**n // 2**shift} {unit}"
    for n, (shift, unit) in enumerate(
        [(0, "B")] * 5 + [(10, "KiB")] * 5 + [(20, "MiB")] * 5 + [(30, "GiB")] * 5
    )
]


@dataclass(frozen=True)
class Straggler:
    """The rank that costs the most time by entering collectives last.

    Attributes:
        rank: The rank.
        cause: What it does meanwhile; see ``stragglers`` in the report reference.
        lateness_s: How late it enters them, as a median.
    """

    rank: int
    cause: str
    lateness_s: float


@dataclass(frozen=True)
class Readings:
    """The job at one moment. Quantities are null without complete steps in the last seconds.

    Attributes:
        status: ``running``, ``complete`` or ``partial``.
        num_steps: Steps that all ranks of this launcher have completed since they are watched.
        window_steps: Number of steps that the quantities are means of.
        ranks: Number of ranks that were seen.
        recording: Number of ranks whose recording is switched on.
        lost: Events that were lost so far.
        quantities: See `QUANTITIES` of `alert_expression.py`.
        wait_s: Rank -> its waiting in a step.
        memory_bytes: Rank -> its resident memory.
        busbw: (Operation, size class) -> bus bandwidth in bytes per second.
        flops_per_step: Floating-point operations of a rank in a step: the most that were seen so
            far, as of some steps only a part has been read.
        straggler: The rank that costs most; None if there is none.
        goodput: Shares of the job's time so far by what it went to.
        alerts: Dead ranks and hangs.
    """

    status: str = "running"
    num_steps: int = 0
    window_steps: int = 0
    ranks: int = 0
    recording: int = 0
    lost: int = 0
    quantities: Mapping[str, float] = field(default_factory=dict)
    wait_s: Mapping[int, float] = field(default_factory=dict)
    memory_bytes: Mapping[int, float] = field(default_factory=dict)
    busbw: Mapping[tuple[str, str], float] = field(default_factory=dict)
    flops_per_step: float | None = None
    straggler: Straggler | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()


def read(live: LiveTrace, former: Readings, peak_tflops: float | None = None) -> Readings:
    """Reads what the ranks have written since the last call, and analyzes the last seconds.

    Args:
        former: The result of the last call: without a new step, the job has no quantities.
        peak_tflops: See `Trace`.

    Raises:
        TraceError: The directory holds no trace.
    """
    state = live.state()
    memory = {row.rank: row.memory_bytes for row in state.rows if row.memory_bytes is not None}
    infos = live.processes()
    facts = Readings(
        status=state.status,
        num_steps=state.num_steps,
        ranks=len(infos),
        recording=sum(info.status == "running" and not info.is_off for info in infos),
        lost=sum(info.dropped for info in infos),
        memory_bytes=memory,
        flops_per_step=former.flops_per_step,
        goodput=live.goodput(),
        alerts=state.alerts,
    )
    if state.num_steps == former.num_steps:
        return facts
    with tempfile.TemporaryDirectory(prefix="ddltrace-window-") as folder:
        live.save_window(Path(folder))
        try:
            analysis = open_trace(folder).analyze()
        except DdltraceError:
            return facts  # the ranks have no step in common yet
    return _measured(facts, analysis, peak_tflops)


def _measured(facts: Readings, analysis: Analysis, peak_tflops: float | None) -> Readings:
    summary = analysis.summary
    steps = summary.steps
    if not steps or not summary.step_us.mean or not summary.rank_step_us.mean:
        return facts
    rank_step_s = summary.rank_step_us.mean / 1e6
    waits = {
        row.rank: row.wait_us / steps / 1e6 for row in analysis.ranks if row.wait_us is not None
    }
    wait_s = sum(waits.values()) / max(1, len(waits))
    flops = max(summary.flops_per_step or 0.0, facts.flops_per_step or 0.0) or None
    mfu = None
    if flops is not None and peak_tflops is not None:
        mfu = utilization(flops, rank_step_s, peak_tflops)
    quantities = {
        "step_seconds": summary.step_us.mean / 1e6,
        "wait_seconds": wait_s,
        "wait_share": wait_s / rank_step_s,
    }
    for name, value in (
        ("exposed_share", summary.exposed_comm_share),
        ("idle_share", summary.idle_share),
        ("data_share", summary.data_share),
        ("overlap_ratio", summary.overlap_ratio),
        ("samples_per_second", summary.samples_per_s),
        ("tokens_per_second", summary.tokens_per_s),
        ("mfu", mfu),
    ):
        if value is not None:
            quantities[name] = value
    if "exposed_share" in quantities:
        quantities["exposed_seconds"] = quantities["exposed_share"] * rank_step_s
    if facts.memory_bytes:
        quantities["memory_bytes"] = max(facts.memory_bytes.values())
    straggler = None
    if analysis.stragglers:
        worst = analysis.stragglers[0]
        straggler = Straggler(worst.rank, worst.cause or "unknown", worst.lateness_us / 1e6)
        quantities["lateness_seconds"] = straggler.lateness_s
    return replace(
        facts,
        window_steps=steps,
        flops_per_step=flops,
        quantities=quantities,
        wait_s=waits,
        busbw=_bus_bandwidths(analysis),
        straggler=straggler,
    )


def _bus_bandwidths(analysis: Analysis) -> dict[tuple[str, str], float]:
    """Bus bandwidth by operation and size class, each class four times the former."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for row in analysis.collectives:
        if row.busbw_gbps and row.bytes:
            key = row.op, size_class(row.bytes)
            total, count = sums.get(key, (0.0, 0))
            sums[key] = total + row.busbw_gbps * 1e9 / 8 * row.count, count + row.count
    return {key: total / count for key, (total, count) in sums.items()}


def size_class(num_bytes: int) -> str:
    """The smallest power of four that is not smaller than a size, such as ``64 KiB``."""
    place = math.ceil(math.log(max(1, num_bytes), 4) - 1e-9)
    return _SIZES[min(place, len(_SIZES) - 1)]
