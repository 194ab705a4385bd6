"""Findings: what could make the step shorter, by how much at most, and what would test it.

Every finding rests on a number of the analysis. What it could save is bounded by what the
critical path of the steady steps holds of it: removing it altogether cannot save more.

A finding comes with what would test it: an experiment with other strategies, where one changes
what it is about, on a model that sends as much; else the job once more after the change, and its
comparison with this trace. Who recorded the job with another tool records it again with that.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from ddltrace.analyzer.events.copies import DIRECTIONS
from ddltrace.analyzer.formatting.text_table import shorten
from ddltrace.analyzer.formatting.units import bytes_text, printable, share_text, time_text
from ddltrace.analyzer.measures.stragglers import holds_others_up
from ddltrace.analyzer.model import (
    CATEGORIES,
    Analysis,
    CollectiveRow,
    Finding,
    PathPart,
    StragglerRow,
)

_MIN_SHARE: Final = 0.02
"""Findings that could save less than this part of a step are left out."""

_SMALL_BYTES: Final = 64 << 10
"""Messages below this are paid for by their number more than by their size."""

_LOW_OVERLAP: Final = 0.5
_MAX_COMMAND: Final = 300
_MAX_NAME: Final = 60

_BYTES_PER_WIDTH: Final = 1128
"""``ddltrace experiment run --width W`` exchanges about this many bytes times W squared."""

_WIDTHS: Final = (16, 128)
"""Below, messages are too small to tell strategies apart; above, processors take minutes."""

_MOST_RANKS: Final = 4
"""More rank processes than this on one machine measure its processors, not their exchange."""

_FIXES: Final = {
    "compute": "give that rank less work, or look for what slows its device",
    "data": "give its data loader more workers, or look at where it reads from",
    "copy": "look at what that rank copies from and to its device that the others do not",
    "host": "look at what its Python code does outside of forward, backward and optimizer",
    "update": "look at what its optimizer does that the others' does not",
    "network": "look at that rank's own link: its port, its route, what else uses them",
    None: "look at what that rank does before it enters its collectives",
}
_COPIES: Final = {
    "host_to_device": "from host to device",
    "device_to_host": "from device to host",
    "device_to_device": "within the device",
    "peer": "from device to device",
    "fill": "fills",
    "other": "of unknown direction",
}
_COPY_FIXES: Final = {
    "host_to_device": (
        "copy the next batch while this one computes: DataLoader(pin_memory=True) and "
        ".to(device, non_blocking=True)"
    ),
    "device_to_host": (
        "keep results on the device: .item(), .cpu() and printing a tensor copy it to the host; "
        "do so every N steps, or copy into pinned memory with non_blocking=True"
    ),
    "device_to_device": (
        "look for .clone(), .contiguous(), torch.cat and gradients copied into buckets (DDP: "
        "gradient_as_bucket_view=True)"
    ),
    "peer": (
        "look for tensors that a process moves between its devices, and whether these are linked "
        "directly (NVLink)"
    ),
    "fill": "use zero_grad(set_to_none=True), and torch.empty where all values are overwritten",
    "other": "look at the largest copies in the table of the critical path's parts",
}
_FIX_ON_ONE_HOST: Final = (
    "look for what takes its core from that rank's communication: other work on the host, more "
    "threads than cores (OMP_NUM_THREADS)"
)


def find_findings(analysis: Analysis, path: Path | None = None) -> tuple[Finding, ...]:
    """All findings of an analysis, the largest possible saving first.

    Args:
        analysis: The measured trace.
        path: Where the trace is, to compare another with it; None if it is in several places.
    """
    wall = analysis.summary.step_us.mean
    if not wall:
        return ()
    held = path_shares(analysis)
    found = [
        *_communication(analysis, held, wall),
        *_straggler(analysis, wall),
        *_host(analysis, held, wall),
        *_data(analysis, held, wall),
        *_copy(analysis, held, wall),
        *_update(analysis, held, wall),
        *_compute(analysis, held, wall),
    ]
    again = _again(analysis, path)
    worth = [
        replace(finding, command=finding.command or again)
        for finding in found
        if finding.share >= _MIN_SHARE
    ]
    return tuple(sorted(worth, key=lambda finding: -finding.saves_us))


def path_shares(analysis: Analysis) -> dict[str, float]:
    """Category -> its share of the critical paths of the steady steps; they sum to 1."""
    rows = [row.critical_path for row in analysis.steps if row.steady]
    total = sum(row.total_us for row in rows)
    if not total:
        return {}
    return {name: sum(getattr(row, f"{name}_us") for row in rows) / total for name in CATEGORIES}


def _communication(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["transfer"]
    row = _main_collective(analysis)
    if not share or row is None:
        return
    top = _largest(analysis, "transfer")
    part = "" if top is None else f", {share_text(top.share / share)} of it {_named(top)}"
    overlap = analysis.summary.overlap_ratio
    hidden = "" if overlap is None else f"; {share_text(overlap)} of communication is overlapped"
    per_step = round(row.count / max(analysis.trace.steps, 1))
    if row.bytes is not None and row.bytes < _SMALL_BYTES and per_step > 1:
        advice = (
            f"merge messages: {per_step} {row.op} of {bytes_text(row.bytes)} in each step pay the "
            "network's latency one by one"
        )
        command = _experiment(analysis, "wfbp", "ddp")
    elif overlap is not None and overlap < _LOW_OVERLAP:
        advice = (
            "start sending earlier, in smaller buckets (DDP's bucket_cap_mb, DeepSpeed's "
            "reduce_bucket_size) or each gradient as soon as it is ready"
        )
        command = _experiment(analysis, "ddp", "ddp:bucket_mb=1", "wfbp")
    else:
        advice = (
            "send less: gradients in half precision (bf16_compress_hook) halve the "
            f"{bytes_text(_bytes_per_step(analysis))} a step"
        )
        command = None
    yield Finding(
        kind="communication",
        saves_us=share * wall,
        share=share,
        evidence=f"{share_text(share)} of the critical path is transfer{part}{hidden}",
        advice=advice,
        command=command,
        unsure=row.unsure,
    )


def _straggler(analysis: Analysis, wall: float) -> Iterable[Finding]:
    share = analysis.summary.sync_overhead_share
    if not share or not analysis.stragglers:
        return
    worst = analysis.stragglers[0]
    culprit = holds_others_up(analysis.stragglers, len(analysis.trace.ranks))
    if culprit is None:
        how = f"they take turns at it, rank {worst.rank} last to {share_text(worst.share)}"
        advice = (
            "look for what varies from rank to rank and step to step: the lengths of inputs, "
            "garbage collection, other work on the machines"
        )
    else:
        how, advice = (
            f"rank {culprit.rank} is {_lateness(analysis, culprit)}",
            _fix(analysis, culprit),
        )
    yield Finding(
        kind="straggler",
        saves_us=share * wall,
        share=share,
        evidence=f"ranks wait for others during {share_text(share)} of the step; {how}",
        advice=advice,
        command=None,
        unsure=worst.unsure,
    )


def _lateness(analysis: Analysis, row: StragglerRow) -> str:
    how = f"last in {share_text(row.share)} of its collectives, by {time_text(row.lateness_us)}"
    if row.sometimes:
        how = f"late in {row.late_steps} of {analysis.summary.steps} steps"
        how += f", by {time_text(row.late_step_us)} in these"
    if row.cause is None:
        return how
    longer = time_text(row.cause_us)
    return f"{how}, whose {cause_text(analysis, row)} takes {longer} a step longer than the others'"


def cause_text(analysis: Analysis, row: StragglerRow) -> str | None:
    """What a late rank does longer than the others; None where that is not known."""
    if row.cause != "network":
        return row.cause
    return "own transfer" if _on_one_host(analysis) else "own network"


def _fix(analysis: Analysis, row: StragglerRow) -> str:
    if row.cause == "network" and _on_one_host(analysis):
        return _FIX_ON_ONE_HOST
    return _FIXES[row.cause]


def _on_one_host(analysis: Analysis) -> bool:
    return len(analysis.trace.hosts) == 1


def _host(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["host"]
    top = _largest(analysis, "host")
    where = "" if top is None else f", most of it on rank {top.rank}"
    record = "" if analysis.trace.source == "ddltrace" else "record it with ddltrace run and "
    yield Finding(
        kind="host",
        saves_us=share * wall,
        share=share,
        evidence=(
            f"{share_text(share)} of the critical path is host code outside of forward, "
            f"backward, optimizer and data loading{where}"
        ),
        advice=(
            "look for logging, .item(), checkpoints or sleeps between steps; "
            f"{record}mark regions with ddltrace.annotate to see which"
        ),
        command=None,
        unsure=False,
    )


def _data(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["data"]
    top = _largest(analysis, "data")
    where = "" if top is None else f", most of it on rank {top.rank}"
    yield Finding(
        kind="data",
        saves_us=share * wall,
        share=share,
        evidence=f"{share_text(share)} of the critical path is fetching batches{where}",
        advice="give the DataLoader more num_workers, and persistent_workers=True",
        command=None,
        unsure=False,
    )


def _copy(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["copy"]
    if not share:
        return
    rows = [row.copies for row in analysis.steps if row.steady]
    by_direction = {
        name: sum(getattr(row, f"{name}_us") for row in rows) / len(rows) for name in DIRECTIONS
    }
    main = max(DIRECTIONS, key=lambda name: by_direction[name])
    top = _largest(analysis, "copy")
    where = "" if top is None else f", most of it on rank {top.rank}"
    yield Finding(
        kind="copy",
        saves_us=share * wall,
        share=share,
        evidence=(
            f"{share_text(share)} of the critical path is device copies, "
            f"{time_text(by_direction[main])} a step of it {_COPIES[main]}{where}"
        ),
        advice=_COPY_FIXES[main],
        command=None,
        unsure=False,
    )


def _update(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["update"]
    yield Finding(
        kind="update",
        saves_us=share * wall,
        share=share,
        evidence=f"{share_text(share)} of the critical path is the optimizer's update",
        advice="use the optimizer's fused=True or foreach=True, or shard it over the ranks (ZeRO)",
        command=None,
        unsure=False,
    )


def _compute(analysis: Analysis, held: dict[str, float], wall: float) -> Iterable[Finding]:
    share = held["compute"]
    top = _largest(analysis, "compute")
    what = ""
    if top is not None and top.name is not None:
        what = f"; its largest part is {_named(top)} on rank {top.rank}, {time_text(top.us)} a step"
    yield Finding(
        kind="compute",
        saves_us=share * wall,
        share=share,
        evidence=f"{share_text(share)} of the critical path is forward and backward{what}",
        advice=(
            "make the model's own work faster (lower precision, torch.compile, larger batches): "
            f"no change to communication can save more than {share_text(1 - share)} of the step"
        ),
        command=None,
        unsure=False,
    )


def _experiment(analysis: Analysis, *strategies: str) -> str:
    """Trains with strategies on a model that exchanges as many bytes a step as the job."""
    named = " ".join(f"--strategy {strategy}" for strategy in strategies)
    ranks = min(max(analysis.trace.world_size, 2), _MOST_RANKS)
    wanted = math.sqrt(_bytes_per_step(analysis) / _BYTES_PER_WIDTH)
    width = min(max(8 * round(wanted / 8), _WIDTHS[0]), _WIDTHS[1])
    return f"ddltrace experiment run {named} --ranks {ranks} --width {width}"


def _again(analysis: Analysis, path: Path | None) -> str | None:
    """Records the job once more, where the trace tells its command, and compares with this trace.

    None if it neither tells the command nor lies in one place.
    """
    trace = analysis.trace
    compare = None if path is None else f"ddltrace compare {shlex.quote(str(path))} after"
    job = shlex.join(trace.command)
    if trace.source != "ddltrace" or not job or len(job) > _MAX_COMMAND:
        return compare
    level = f" --level {trace.level}" if trace.level in ("comm", "op") else ""
    record = f"ddltrace run{level} -o after -- {job}"
    return record if compare is None else f"{record} && {compare}"


def _largest(analysis: Analysis, category: str) -> PathPart | None:
    return next((part for part in analysis.critical_path if part.category == category), None)


def _named(part: PathPart) -> str:
    """Names of kernels and of tensors may be longer than the sentence that they stand in."""
    return shorten(printable(part.name or part.category), _MAX_NAME)


def _main_collective(analysis: Analysis) -> CollectiveRow | None:
    timed = [row for row in analysis.collectives if row.transfer_us_total is not None]
    return max(timed, key=lambda row: row.transfer_us_total or 0.0, default=None)


def _bytes_per_step(analysis: Analysis) -> float:
    """Bytes that the mean rank sends in a step."""
    sent = sum(row.bytes_sent for row in analysis.ranks)
    return sent / len(analysis.ranks) / max(analysis.trace.steps, 1)
