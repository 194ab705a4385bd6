"""The report of an analysis for a terminal, most important parts first.

This module renders an `Analysis` and reads no files.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from ddltrace.analyzer.findings.advice import path_shares
from ddltrace.analyzer.formatting.terminal import Bar, Paragraph, Section, TextTable, layout
from ddltrace.analyzer.formatting.text_table import kernel_text, shorten
from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bandwidth_text,
    bytes_text,
    counted,
    printable,
    share_text,
    time_text,
)
from ddltrace.analyzer.measures.device_queues import DEVICE_QUEUES
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.measure import Measure
from ddltrace.analyzer.measures.operation_rows import KERNELS, OPERATORS
from ddltrace.analyzer.measures.rank_measures import RankRow
from ddltrace.analyzer.measures.root_causes import RootCause
from ddltrace.analyzer.measures.stragglers import StragglerRow
from ddltrace.analyzer.measures.summary import Summary
from ddltrace.analyzer.measures.trace_facts import TraceFacts
from ddltrace.analyzer.model import MEASURES, Analysis
from ddltrace.analyzer.report.nccl_text import nccl_section
from ddltrace.analyzer.report.notes import host_ahead, notes_of, state_text
from ddltrace.analyzer.report.sentences import (
    dimensions_text,
    extra_text,
    goodput_text,
    hang_text,
    idle_text,
    predicted_text,
    ranks_text,
    sentences,
    throughput_of,
)

_BAR_COLORS: Final = {
    "compute": "blue",
    "transfer": "yellow",
    "wait": "magenta",
    "update": "cyan",
    "data": "green",
    "copy": "bright_blue",
    "training": "blue",
}
_MAX_NOTES: Final = 8
_MAX_RANKS: Final = 16
_MAX_ROWS: Final = 8
_MAX_SLOW: Final = 5
_MAX_PIPELINES: Final = 4
_NAME: Final = 30
_CAUSE_NAME: Final = 20
_GROUPS: Final = 36
_LEAST_CAUSE: Final = 0.01

MOST_LINES: Final = 20
"""Of the first screen, with the command that comes next."""

_LAST_LINES: Final = 3
"""An empty line, the command that shows all, and the command that comes next."""

_FIRST_NOTES: Final = 4
_CAUSES: Final = 3
_Detail = Literal["evidence", "advice", "first clause"]
_DETAILS: Final[tuple[_Detail, ...]] = ("first clause", "advice", "evidence")
_CLAUSE_END: Final = re.compile(r"[;:] | \(")
_PARTS: Final = {
    "communication": "transfer of messages",
    "compute": "compute",
    "copy": "device copies",
    "data": "data loading",
    "host": "host code",
    "straggler": "waiting for others",
    "update": "the optimizer's update",
}
"""Kinds of findings -> what they would shorten; others are named as they are."""

_PLACED: Final = (KERNELS, OPERATORS, DEVICE_QUEUES)
"""Measures whose tables have a place; those of others stand before the findings."""


def render_report(analysis: Analysis, width: int = 100, *, colors: bool = False) -> str:
    """Returns the whole report.

    Args:
        analysis: The measured trace.
        width: Columns that a line may take.
        colors: Whether to color it.
    """
    sections = [
        _sentences(analysis),
        _head(analysis),
        _notes(analysis),
        _hangs(analysis),
        _path(analysis),
        _slow_steps(analysis),
        _goodput(analysis),
        _ranks(analysis),
        _idle(analysis),
        _dimensions(analysis),
        _collectives(analysis),
        _cost(analysis),
        _p2p(analysis),
        _pipelines(analysis),
        _ideal_job(analysis),
        _stragglers(analysis),
        _root_causes(analysis),
        _tensors(analysis),
        _table(analysis, KERNELS),
        _table(analysis, OPERATORS),
        _shapes(analysis),
        _table(analysis, DEVICE_QUEUES),
        _device_steps(analysis),
        *(_table(analysis, each) for each in MEASURES.values() if each not in _PLACED),
        nccl_section(analysis.nccl),
        _findings(analysis),
        _clock(analysis),
    ]
    return layout(sections, width, colors=colors)


def render_first_screen(analysis: Analysis, width: int, *, colors: bool = False) -> str:
    """Returns what a reader needs first: the verdict, and the three changes that save most.

    Verdict and notes are always whole; of the changes, as many are shown as fit. With the commands
    that come next it takes at most 20 lines, unless verdict and notes alone take more.

    Args:
        analysis: The measured trace.
        width: Columns that a line may take.
        colors: Whether to color it.
    """
    said = sentences(analysis)  # the last one proposes a change, of which more follow
    top: Section = [
        *map(Paragraph, said[:-1] if analysis.findings else said),
        Paragraph(_job(analysis.trace), "  ", bold=True),
        *_throughput(analysis.summary),
    ]
    notes = notes_of(analysis)
    top += [Paragraph(f"! {note}", "  ", "yellow") for note in notes[:_FIRST_NOTES]]
    if len(notes) > _FIRST_NOTES:
        top.append(f"! {counted(len(notes) - _FIRST_NOTES, 'more note')}")
    findings = analysis.findings[:_CAUSES]
    details = [len(_DETAILS) - 1] * len(findings)
    while details:
        changes = [
            Paragraph(f"{number}. {_change(finding, _DETAILS[detail])}", "   ")
            for number, (finding, detail) in enumerate(
                zip(findings[: len(details)], details, strict=True), start=1
            )
        ]
        title = "What could make the step shorter"
        text = layout([top, [title, *changes]], width, colors=colors)
        if text.count("\n") < MOST_LINES - _LAST_LINES:
            return text
        most = max(details)  # the last of those that say most says less
        place = len(details) - 1 - details[::-1].index(most)
        if most:
            details[place] -= 1
        else:
            details.pop()
    return layout([top], width, colors=colors)


def _change(finding: Finding, detail: _Detail) -> str:
    """A finding in one sentence or two, as long as there is room for."""
    saves = f" (saves at most {time_text(finding.saves_us)} a step)" if finding.has_saving else ""
    unsure = " (unsure)" if finding.unsure else ""
    said = printable(finding.advice)
    if detail == "first clause":
        said = _CLAUSE_END.split(said, maxsplit=1)[0]
    if detail == "evidence" or not finding.has_saving:
        said = f"{printable(finding.evidence)}. Try: {said}"
    part = _PARTS.get(finding.kind, finding.kind)
    if finding.rank is not None:
        part = f"{part} on rank {finding.rank}"
        if finding.kind == "straggler":
            part = f"waiting for rank {finding.rank}"
    return f"{part}{saves}{unsure}: {said}. {predicted_text(finding)}".rstrip()


def _sentences(analysis: Analysis) -> Section:
    return [Paragraph(sentence) for sentence in sentences(analysis)]


def _job(trace: TraceFacts) -> str:
    """What was recorded: ``run: 4 ranks on 2 hosts, 40 steps, 6,628 events, complete``."""
    hosts = f"{len(trace.hosts)} host{'' if len(trace.hosts) == 1 else 's'}"
    ranks = f"{len(trace.ranks)} of {trace.world_size} ranks"
    if len(trace.ranks) == trace.world_size:
        ranks = f"{trace.world_size} rank{'' if trace.world_size == 1 else 's'}"
    return (
        f"{trace.name}: {ranks} on {hosts}, {counted(trace.steps, 'step')}, "
        f"{trace.events:,} events, {state_text(trace)}"
    )


def _head(analysis: Analysis) -> Section:
    summary = analysis.summary
    lines = [_job(analysis.trace)]
    if summary.steps:
        left = f", {summary.warmup_steps} left out" if summary.warmup_steps else ""
        lines.append(f"Summary over {counted(summary.steps, 'step')}{left} ({summary.rule}).")
    return [*map(Paragraph, lines), *_throughput(summary)]


def _throughput(summary: Summary) -> Section:
    parts = [f"{value} {what}" for what, value, _ in throughput_of(summary)]
    return [Paragraph(f"Throughput: {', '.join(parts)}.", "  ")] if parts else []


def _notes(analysis: Analysis) -> Section:
    notes = notes_of(analysis)
    lines: Section = [Paragraph(f"! {note}", "  ", "yellow") for note in notes[:_MAX_NOTES]]
    if len(notes) > _MAX_NOTES:
        lines.append(f"! {len(notes) - _MAX_NOTES} more notes in --json")
    return lines


def _hangs(analysis: Analysis) -> Section:
    """Lists all hangs, if there are more than the first sentence contains."""
    if len(analysis.hangs) < 2:
        return []
    lines: Section = ["Messages that hang, causes before their consequences"]
    for hang in analysis.hangs[:_MAX_ROWS]:
        lines += [Paragraph(f"  {hang_text(hang)}", indent="    ")]
    return lines + _more(len(analysis.hangs), _MAX_ROWS)


def _path(analysis: Analysis) -> Section:
    shares = path_shares(analysis)
    if not shares:
        return []
    mean = analysis.summary.step_us.mean or 0.0
    lines: Section = ["On the critical path of a step (mean; the parts sum to the step)"]
    for name, share in shares.items():
        if share:
            text = f"  {name:<9} {time_text(share * mean):>10} {share_text(share):>8}"
            lines.append(Bar(text, share, _BAR_COLORS.get(name)))
    header = ["largest parts", "category", "rank", "a step", "share", "saves alone"]
    parts = [part for part in analysis.critical_path if part.name is not None][:_MAX_ROWS]
    rows = [
        [
            str(part.name),
            part.category,
            str(part.rank),
            time_text(part.us),
            share_text(part.share),
            time_text(part.alone_us),
        ]
        for part in parts
    ]
    return [
        *lines,
        TextTable(header, rows, keys=3),
    ]


def _slow_steps(analysis: Analysis) -> Section:
    slow = analysis.slow_steps
    if not slow.steps:
        return []
    lines: Section = [
        Paragraph(
            f"Slow steps: {len(slow.steps)} of {analysis.summary.steps} took longer than "
            f"{time_text(slow.limit_us)} (median {time_text(slow.median_us)})"
        )
    ]
    cells = [
        [str(row.step), time_text(row.wall_us), time_text(row.longer_us), extra_text(row)]
        for row in slow.steps[:_MAX_SLOW]
    ]
    lines += [TextTable(["step", "duration", "longer by", "largest extra time"], cells)]
    return lines + _more(len(slow.steps), _MAX_SLOW)


def _goodput(analysis: Analysis) -> Section:
    goodput = analysis.goodput
    if goodput is None:
        return []
    lines: Section = [Paragraph(goodput_text(goodput, analysis.trace.status))]
    for name, share in vars(goodput.shares).items():
        us = None if share is None else share * goodput.wall_us
        text = f"  {name:<10} {time_text(us):>10} {share_text(share):>8}"
        if share:
            lines.append(Bar(text, share, _BAR_COLORS.get(name)))
        elif share is None:
            lines.append(f"{text}  not recorded")
    return lines


def _ranks(analysis: Analysis) -> Section:
    header = [
        "rank", "step p50", "compute", "comm", "overlap", "exposed", "waiting", "transfer",
        "data", "update", "idle",
    ]  # fmt: skip
    rows = list(analysis.ranks)
    if not rows:
        return []
    left = len(rows) - _MAX_RANKS
    if left > 0:
        rows = sorted(rows, key=_slowness)[:_MAX_RANKS]
    cells = [
        [
            str(row.rank),
            time_text(row.step_us_p50),
            time_text(row.compute_us),
            time_text(row.comm_us),
            share_text(row.overlap_ratio),
            time_text(row.exposed_comm_us),
            time_text(row.wait_us),
            time_text(row.transfer_us),
            time_text(row.data_us),
            time_text(row.update_us),
            time_text(row.idle_us),
        ]
        for row in rows
    ]
    lines: Section = [
        *_on_a_rank(analysis.summary),
        "Each rank (totals over the analyzed window)",
        TextTable(header, cells),
    ]
    if left > 0:
        lines.append(f"  {left} more ranks in --json; those shown wait least: others wait for them")
    return lines


def _on_a_rank(summary: Summary) -> Section:
    """The shares that the other forms of the report show as tiles."""
    shares = [
        (summary.compute_share, "compute"),
        (summary.exposed_comm_share, "exposed communication"),
        (summary.copy_share, "copies"),
        (summary.idle_share, "idle"),
    ]
    known = [f"{share_text(share)} {name}" for share, name in shares if share]
    mean = summary.rank_step_us.mean
    of = "Traced time of a rank" if mean is None else f"A rank's step takes {time_text(mean)}"
    return [Paragraph(f"{of} (mean): {', '.join(known)}", "  ")] if known else []


def _idle(analysis: Analysis) -> Section:
    known = [row for row in analysis.idle if row.idle_us is not None]
    if not known:
        return []
    rows = known
    if len(known) > _MAX_RANKS:
        rows = sorted(known, key=lambda row: -(row.idle_us or 0.0))[:_MAX_RANKS]
    # Processes are rarely stopped.
    stopped = any(row.stopped_us for row in known)
    header = ["rank", "idle", "data", "other rank", "message", "host"]
    header += [*(["stopped"] if stopped else []), "unknown", "in messages", "waits for"]
    cells = [
        [
            str(row.rank),
            time_text(row.idle_us),
            time_text(row.data_us),
            time_text(row.other_rank_us),
            time_text(row.message_us),
            time_text(row.host_us),
            *([time_text(row.stopped_us)] if stopped else []),
            time_text(row.unknown_us),
            time_text(row.in_message_us),
            NOT_KNOWN if row.waits_for is None else f"rank {row.waits_for}",
        ]
        for row in rows
    ]
    lines: Section = [
        "Idle time by cause (the causes sum to idle); in messages: only waiting for others in them"
    ]
    lines += [TextTable(header, cells)]
    return lines + _more(len(known), _MAX_RANKS) + [Paragraph(idle_text(analysis.summary), "  ")]


def _dimensions(analysis: Analysis) -> Section:
    rows = analysis.compared_dimensions()
    if not rows:
        return []
    header = ["dimension", "exposed", "waiting", "transfer", "messages", "bytes", "groups"]
    cells = [
        [
            row.dimension,
            time_text(row.exposed_us),
            time_text(row.wait_us),
            time_text(row.transfer_us),
            f"{row.messages:.3g}",
            bytes_text(row.bytes),
            shorten(printable(", ".join(row.groups)), _GROUPS, "start"),
        ]
        for row in rows
    ]
    return [
        "Communication by parallel dimension",
        Paragraph(f"  {dimensions_text(analysis.summary)}", "  "),
        TextTable(header, cells),
    ]


def _slowness(row: RankRow) -> float:
    return row.wait_us if row.wait_us is not None else 0.0


def _collectives(analysis: Analysis) -> Section:
    if not analysis.collectives:
        return []
    header = [
        "collective", "group", "count", "bytes", "waiting", "transfer", "p95", "skew", "bus bw",
    ]  # fmt: skip
    cells = [
        [
            row.op,
            f"{row.group[:12]} ({row.group_size})",
            str(row.count),
            bytes_text(row.bytes),
            time_text(row.wait_us),
            time_text(row.transfer_us) + ("?" if row.unsure else ""),
            time_text(row.transfer_us_p95),
            time_text(row.arrival_skew_us),
            bandwidth_text(row.busbw_gbps),
        ]
        for row in analysis.collectives[:_MAX_ROWS]
    ]
    lines: Section = [
        "Collectives by operation, group and size (medians per call; waiting: mean over ranks)",
        TextTable(header, cells, keys=2),
    ]
    if any(row.unsure for row in analysis.collectives[:_MAX_ROWS]):
        lines.append("  ? less than the error of the aligned clocks")
    return lines + _more(len(analysis.collectives), _MAX_ROWS)


def _cost(analysis: Analysis) -> Section:
    if not analysis.cost_fits:
        return []
    cells = []
    for fit in analysis.cost_fits[:_MAX_ROWS]:
        known = fit.latency_us is not None
        cells.append(
            [
                f"{fit.title}, {fit.backend or 'backend unknown'}",
                str(fit.samples),
                str(fit.sizes),
                time_text(fit.latency_us),
                bandwidth_text(fit.busbw_gbps),
                share_text(fit.error) if known else NOT_KNOWN,
                "yes" if fit.disturbed else "no",
            ]
        )
    header = [
        "operation",
        "samples",
        "sizes",
        "latency",
        "bus bw",
        "error",
        "beside compute",
    ]
    lines: Section = ["Latency and bandwidth, fitted (transfer = latency + bytes / bandwidth)"]
    lines += [TextTable(header, cells)]
    verdicts = {fit.verdict for fit in analysis.cost_fits[:_MAX_ROWS] if fit.verdict != "fitted"}
    return lines + [f"  {NOT_KNOWN} {verdict}" for verdict in sorted(verdicts)]


def _p2p(analysis: Analysis) -> Section:
    if not analysis.p2p:
        return []
    cells = [
        [
            f"{row.src} -> {row.dst}",
            str(row.count),
            bytes_text(row.bytes),
            time_text(row.wait_us),
            time_text(row.transfer_us),
            time_text(row.transfer_us_p50) + ("?" if row.unsure else ""),
            time_text(row.transfer_us_p95),
            bandwidth_text(row.algbw_gbps),
        ]
        for row in analysis.p2p[:_MAX_ROWS]
    ]
    header = ["send to receive", "count", "bytes", "waiting", "transfer", "p50", "p95", "bandwidth"]
    lines: Section = ["Point to point (totals; p50, p95 and bandwidth per message)"]
    lines += [TextTable(header, cells)]
    if any(row.unsure for row in analysis.p2p[:_MAX_ROWS]):
        lines.append("  ? less than the error of the aligned clocks")
    return lines + _more(len(analysis.p2p), _MAX_ROWS)


def _pipelines(analysis: Analysis) -> Section:
    lines: Section = []
    for pipeline in analysis.pipelines[:_MAX_PIPELINES]:
        lines += [
            Paragraph(
                f"Pipeline of {len(pipeline.stages)} stages, {pipeline.microbatches} microbatches: "
                f"bubbles take {share_text(pipeline.bubble_share)} of the stages' time (with equal "
                f"stages and no transfers: {share_text(pipeline.ideal_share)})"
            )
        ]
        cells = [
            [
                str(row.stage),
                str(row.rank),
                time_text(row.work_us),
                time_text(row.bubble_us),
                time_text(row.waiting_us),
                time_text(row.transfer_us),
                _longest(row.forward_us),
                _longest(row.backward_us),
            ]
            for row in pipeline.stages[:_MAX_RANKS]
        ]
        header = [
            "stage", "rank", "compute", "bubble", "waiting", "transfer", "longest forward",
            "longest backward",
        ]  # fmt: skip
        lines += [TextTable(header, cells, keys=2), *_more(len(pipeline.stages), _MAX_RANKS)]
    return lines


def _ideal_job(analysis: Analysis) -> Section:
    ideal = analysis.ideal_job
    if ideal is None:
        return []
    lines: Section = [
        Paragraph(
            f"Straggler slowdown S = {ideal.slowdown:.3f}: a replayed step takes "
            f"{time_text(ideal.replayed_us)} (recorded: {time_text(ideal.step_us)}), and "
            f"{time_text(ideal.ideal_us)} in the ideal job, in which all operations of one type "
            "take equally long"
        )
    ]
    cells = [[row.name, f"{row.slowdown:.3f}"] for row in ideal.operations[:_MAX_ROWS]]
    lines += [TextTable(["operations with their recorded times", "S_t"], cells)]
    lines += _more(len(ideal.operations), _MAX_ROWS)
    cells = [
        [f"rank {row.rank}", str(row.replica), str(row.stage), f"{row.slowdown:.3f}"]
        for row in ideal.workers[:_MAX_ROWS]
    ]
    lines += [TextTable(["worker with its recorded times", "replica", "stage", "S_w"], cells)]
    lines += _more(len(ideal.workers), _MAX_ROWS)
    lines += [
        Paragraph(
            f"{share_text(ideal.m_w)} of the slowdown would be gone if "
            f"{ranks_text(ideal.slowest_ranks)} had ideal times (M_W), "
            f"{share_text(ideal.m_s)} if the last stage had (M_S).",
            "  ",
        )
    ]
    return lines


def _longest(bubbles: tuple[float, ...]) -> str:
    """The longest bubble and its microbatch: ``30.0 ms, number 0``."""
    if not any(bubbles):
        return NOT_KNOWN
    number = max(range(len(bubbles)), key=lambda each: bubbles[each])
    return f"{time_text(bubbles[number])}, number {number}"


def _late_in(row: StragglerRow, steps: int) -> str:
    if not row.late_steps:
        return NOT_KNOWN
    return f"{row.late_steps} of {steps}" if row.sometimes else "most"


def _stragglers(analysis: Analysis) -> Section:
    rows = analysis.stragglers[:5]
    if not rows:
        return []
    cells = [
        [
            str(row.rank),
            str(row.collectives_last),
            share_text(row.share),
            _late_in(row, analysis.summary.steps),
            time_text(row.late_step_us if row.sometimes else row.lateness_us)
            + ("?" if row.unsure else ""),
            time_text(row.lateness_us_total),
            row.cause or NOT_KNOWN,
            time_text(row.cause_us),
        ]
        for row in rows
    ]
    header = [
        "rank",
        "times last",
        "share",
        "late in steps",
        "typical lateness",
        "total",
        "slower activity",
        "longer by",
    ]
    over = " (steady steps)" if analysis.summary.steps else ""
    return [f"Stragglers{over}", TextTable(header, cells)]


def _saves(cause: RootCause) -> str:
    if cause.saves_range_us is None:
        return time_text(cause.saves_us)
    least, most = map(time_text, cause.saves_range_us)
    return f"{least} to {most}"


def _root_causes(analysis: Analysis) -> Section:
    whole = sum(cause.cost_us for cause in analysis.root_causes)
    causes = [cause for cause in analysis.root_causes if cause.cost_us >= _LEAST_CAUSE * whole]
    if not causes or not analysis.waiting.total_us:
        return []
    cells = [
        [
            str(cause.rank),
            cause.activity if cause.peer is None else f"transfer from rank {cause.peer}",
            shorten(cause.name or "", _CAUSE_NAME),
            time_text(cause.direct_us),
            time_text(cause.propagated_us),
            time_text(cause.slower_us) if cause.peer is not None else "",
            share_text(cause.share),
            _saves(cause),
        ]
        for cause in causes[:_MAX_ROWS]
    ]
    header = [
        "root rank", "activity", "operation", "direct", "propagated", "slower", "share", "saves",
    ]  # fmt: skip
    total = time_text(analysis.waiting.total_us)
    over = "a step" if analysis.summary.steps else "in total"
    return [
        Paragraph(f"Root causes of waiting (sums over ranks; {total} of waiting {over})"),
        TextTable(header, cells, keys=3),
        *_more(len(analysis.root_causes), len(cells)),
    ]


def _tensors(analysis: Analysis) -> Section:
    rows = [row for row in analysis.tensors if row.exposed_us is not None][:_MAX_ROWS]
    if not rows:
        return []
    cells = [
        [
            row.name,
            bytes_text(row.bytes),
            time_text(row.ready_us),
            time_text(row.enqueue_us),
            time_text(row.complete_us),
            NOT_KNOWN if row.bucket is None else str(row.bucket),
            time_text(row.exposed_us),
        ]
        for row in rows
    ]
    header = ["tensor", "bytes", "ready", "enqueued", "complete", "tensors in bucket", "exposed"]
    lines: Section = [
        "Most exposed tensors (medians, from the step's start)",
        TextTable(header, cells),
    ]
    without = sum(row.messages == 0 for row in analysis.tensors)
    if without:
        lines.append(
            f"  the gradients of {counted(without, 'parameter')} are in no message of these steps"
        )
    return lines + _more(len(analysis.tensors), _MAX_ROWS)


def _shapes(analysis: Analysis) -> Section:
    """The operators that take longest, by the shapes of their inputs, where those are known."""
    rows = [
        (row.name, part)
        for row in analysis.operators[:_MAX_ROWS]
        for part in row.shapes
        if row.kind == "operator"
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: -row[1].total_us)
    cells = [
        [
            kernel_text(name, _NAME),
            shorten(printable(part.shapes), _NAME),
            f"{part.count:,}",
            time_text(part.total_us),
            time_text(part.mean_us),
        ]
        for name, part in rows[:_MAX_ROWS]
    ]
    lines: Section = ["Operators by the shapes of their inputs (all ranks)"]
    lines += [TextTable(["operator", "shapes of inputs", "count", "total", "mean"], cells, keys=2)]
    return lines + _more(len(rows), _MAX_ROWS)


def _device_steps(analysis: Analysis) -> Section:
    """The steps on the device's time, where the host runs ahead of it."""
    if host_ahead(analysis) is None:
        return []
    cells = [
        [
            f"rank {row.rank}, step {row.step}",
            time_text(row.lag_us),
            time_text(row.period_us),
            time_text(row.compute_us),
            time_text(row.comm_us),
            time_text(row.overlap_us),
            time_text(row.copy_us),
        ]
        for row in analysis.device_steps[:_MAX_RANKS]
    ]
    header = [
        "launched in", "device lag", "device period", "compute", "comm", "overlap", "copies",
    ]  # fmt: skip
    lines: Section = [
        "Steps on the device (lag: from the start on the host; period: until the next step's start)"
    ]
    lines += [TextTable(header, cells)]
    return lines + _more(len(analysis.device_steps), _MAX_RANKS)


def _findings(analysis: Analysis) -> Section:
    lines: Section = []
    for number, finding in enumerate(analysis.findings[:_MAX_ROWS], start=1):
        unsure = " (unsure: less than the error of the aligned clocks)" if finding.unsure else ""
        saves = (
            f"saves at most {time_text(finding.saves_us)} a step"
            if finding.has_saving
            else finding.kind
        )
        text = (
            f"{number}. {saves}: {printable(finding.evidence)}{unsure}. "
            f"Try: {printable(finding.advice)}. {predicted_text(finding)}"
        ).rstrip()
        lines += [Paragraph(text, indent="   ")]
        if finding.command is not None and not finding.is_of_job:
            lines += [Paragraph(f"   {finding.instruction}: {finding.command}", indent="     ")]
    again = [finding for finding in analysis.findings if finding.is_of_job]
    if again:
        lines += [Paragraph(f"{again[0].instruction}: {again[0].command}", indent="  ")]
    return ["What could make the step shorter", *lines] if lines else []


def _clock(analysis: Analysis) -> Section:
    clock = analysis.clock
    if not clock.ranks:
        return []
    if clock.max_residual_us is None:
        unknown = tuple(row.rank for row in clock.ranks if row.residual_us is None)
        sure = f"error not known for {ranks_text(unknown)}, so comparisons across ranks are unsure"
    elif clock.max_residual_us == 0:
        sure = "no error between ranks"
    else:
        sure = f"error at most {time_text(clock.max_residual_us)}"
    return [Paragraph(f"Clocks: {clock.method}; {sure}.")]


def _more(count: int, shown: int) -> Section:
    return [f"  {count - shown} more in --json"] if count > shown else []


def _table(analysis: Analysis, measure: Measure[Any, Any]) -> Section:
    """The first rows of a measure under its title; nothing without rows or a table."""
    rows, table = getattr(analysis, measure.name), measure.table
    if not rows or table is None:
        return []
    cells = table.shown(rows)
    return [table.title, TextTable(list(table.columns), cells), *_more(len(rows), len(cells))]
