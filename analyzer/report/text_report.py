"""The report of an analysis for a terminal, most important parts first.

This module renders an `Analysis` and reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from ddltrace.analyzer.findings.advice import path_shares
from ddltrace.analyzer.formatting.terminal import (
    Bar,
    Columns,
    Paragraph,
    Section,
    layout,
    more,
    table_of,
)
from ddltrace.analyzer.formatting.text_table import kernel_text, shorten
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text, time_text
from ddltrace.analyzer.measures.collectives import CollectiveRow, P2PRow
from ddltrace.analyzer.measures.device_queues import DEVICE_QUEUES
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.measure import Measure
from ddltrace.analyzer.measures.operation_rows import KERNELS, OPERATORS
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
from ddltrace.tracer.number_text import counted

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
    hosts = counted(len(trace.hosts), "host")
    ranks = counted(trace.world_size, "rank")
    if len(trace.ranks) != trace.world_size:
        ranks = f"{len(trace.ranks)} of {ranks}"
    return (
        f"{trace.name}: {ranks} on {hosts}, {counted(trace.steps, 'step')}, "
        f"{counted(trace.events, 'event')}, {state_text(trace)}"
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
    return lines + more(len(analysis.hangs), _MAX_ROWS)


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
    parts = [part for part in analysis.critical_path if part.name is not None][:_MAX_ROWS]
    columns: Columns = {
        "largest parts": "name",
        "category": "category",
        "rank": "rank",
        "a step": lambda part: time_text(part.us),
        "share": "share",
        "saves alone": "alone_us",
    }
    return [*lines, table_of(parts, columns, keys=3)]


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
    columns: Columns = {
        "step": "step",
        "duration": "wall_us",
        "longer by": "longer_us",
        "largest extra time": extra_text,
    }
    lines += [table_of(slow.steps[:_MAX_SLOW], columns)]
    return lines + more(len(slow.steps), _MAX_SLOW)


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
    rows = list(analysis.ranks)
    if not rows:
        return []
    left = len(rows) - _MAX_RANKS
    if left > 0:
        rows = sorted(rows, key=lambda row: row.wait_us or 0.0)[:_MAX_RANKS]
    columns: Columns = {
        "rank": "rank",
        "step p50": "step_us_p50",
        "compute": "compute_us",
        "comm": "comm_us",
        "overlap": "overlap_ratio",
        "exposed": "exposed_comm_us",
        "waiting": "wait_us",
        "transfer": "transfer_us",
        "data": "data_us",
        "update": "update_us",
        "idle": "idle_us",
    }
    lines: Section = [
        *_on_a_rank(analysis.summary),
        "Each rank (totals over the analyzed window)",
        table_of(rows, columns),
    ]
    if left > 0:
        others = counted(left, "more rank")
        lines.append(f"  {others} in --json; those shown wait least: others wait for them")
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
    columns: Columns = {
        "rank": "rank",
        "idle": "idle_us",
        "data": "data_us",
        "other rank": "other_rank_us",
        "message": "message_us",
        "host": "host_us",
        **({"stopped": "stopped_us"} if stopped else {}),
        "unknown": "unknown_us",
        "in messages": "in_message_us",
        "waits for": lambda row: NOT_KNOWN if row.waits_for is None else f"rank {row.waits_for}",
    }
    lines: Section = [
        "Idle time by cause (the causes sum to idle); in messages: only waiting for others in them",
        table_of(rows, columns),
    ]
    return lines + more(len(known), _MAX_RANKS) + [Paragraph(idle_text(analysis.summary), "  ")]


def _dimensions(analysis: Analysis) -> Section:
    rows = analysis.compared_dimensions()
    if not rows:
        return []
    columns: Columns = {
        "dimension": "dimension",
        "exposed": "exposed_us",
        "waiting": "wait_us",
        "transfer": "transfer_us",
        "messages": lambda row: f"{row.messages:.3g}",
        "bytes": "bytes",
        "groups": lambda row: shorten(printable(", ".join(row.groups)), _GROUPS, "start"),
    }
    return [
        "Communication by parallel dimension",
        Paragraph(f"  {dimensions_text(analysis.summary)}", "  "),
        table_of(rows, columns),
    ]


def _collectives(analysis: Analysis) -> Section:
    if not analysis.collectives:
        return []
    rows = analysis.collectives[:_MAX_ROWS]
    columns: Columns = {
        "collective": "op",
        "group": lambda row: f"{row.group[:12]} ({row.group_size})",
        "count": "count",
        "bytes": "bytes",
        "waiting": "wait_us",
        "transfer": lambda row: time_text(row.transfer_us) + ("?" if row.unsure else ""),
        "p95": "transfer_us_p95",
        "skew": "arrival_skew_us",
        "bus bw": "busbw_gbps",
    }
    lines: Section = [
        "Collectives by operation, group and size (medians per call; waiting: mean over ranks)",
        table_of(rows, columns, keys=2),
        *_unsure(rows),
    ]
    return lines + more(len(analysis.collectives), _MAX_ROWS)


def _cost(analysis: Analysis) -> Section:
    if not analysis.cost_fits:
        return []
    columns: Columns = {
        "operation": lambda fit: f"{fit.title}, {fit.backend or 'backend unknown'}",
        "samples": "samples",
        "sizes": "sizes",
        "latency": "latency_us",
        "bus bw": "busbw_gbps",
        "error": lambda fit: share_text(None if fit.latency_us is None else fit.error),
        "beside compute": lambda fit: "yes" if fit.disturbed else "no",
    }
    lines: Section = [
        "Latency and bandwidth, fitted (transfer = latency + bytes / bandwidth)",
        table_of(analysis.cost_fits[:_MAX_ROWS], columns),
    ]
    verdicts = {fit.verdict for fit in analysis.cost_fits[:_MAX_ROWS] if fit.verdict != "fitted"}
    return lines + [f"  {NOT_KNOWN} {verdict}" for verdict in sorted(verdicts)]


def _p2p(analysis: Analysis) -> Section:
    if not analysis.p2p:
        return []
    rows = analysis.p2p[:_MAX_ROWS]
    columns: Columns = {
        "send to receive": lambda row: f"{row.src} -> {row.dst}",
        "count": "count",
        "bytes": "bytes",
        "waiting": "wait_us",
        "transfer": "transfer_us",
        "p50": lambda row: time_text(row.transfer_us_p50) + ("?" if row.unsure else ""),
        "p95": "transfer_us_p95",
        "bandwidth": "algbw_gbps",
    }
    lines: Section = [
        "Point to point (totals; p50, p95 and bandwidth per message)",
        table_of(rows, columns),
        *_unsure(rows),
    ]
    return lines + more(len(analysis.p2p), _MAX_ROWS)


def _unsure(rows: Sequence[CollectiveRow | P2PRow]) -> Section:
    unsure = any(row.unsure for row in rows)
    return ["  ? less than the error of the aligned clocks"] if unsure else []


def _pipelines(analysis: Analysis) -> Section:
    columns: Columns = {
        "stage": "stage",
        "rank": "rank",
        "compute": "work_us",
        "bubble": "bubble_us",
        "waiting": "waiting_us",
        "transfer": "transfer_us",
        "longest forward": lambda row: _longest(row.forward_us),
        "longest backward": lambda row: _longest(row.backward_us),
    }
    lines: Section = []
    for pipeline in analysis.pipelines[:_MAX_PIPELINES]:
        lines += [
            Paragraph(
                f"Pipeline of {len(pipeline.stages)} stages, {pipeline.microbatches} microbatches: "
                f"bubbles take {share_text(pipeline.bubble_share)} of the stages' time (with equal "
                f"stages and no transfers: {share_text(pipeline.ideal_share)})"
            )
        ]
        lines += [
            table_of(pipeline.stages[:_MAX_RANKS], columns, keys=2),
            *more(len(pipeline.stages), _MAX_RANKS),
        ]
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
    slowdown: Final = lambda row: f"{row.slowdown:.3f}"  # noqa: E731
    operations: Columns = {"operations with their recorded times": "name", "S_t": slowdown}
    workers: Columns = {
        "worker with its recorded times": lambda row: f"rank {row.rank}",
        "replica": "replica",
        "stage": "stage",
        "S_w": slowdown,
    }
    lines += [table_of(ideal.operations[:_MAX_ROWS], operations)]
    lines += more(len(ideal.operations), _MAX_ROWS)
    lines += [table_of(ideal.workers[:_MAX_ROWS], workers)]
    lines += more(len(ideal.workers), _MAX_ROWS)
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


def _stragglers(analysis: Analysis) -> Section:
    rows, steps = analysis.stragglers[:5], analysis.summary.steps
    if not rows:
        return []

    def late_in(row: StragglerRow) -> str:
        if not row.late_steps:
            return NOT_KNOWN
        return f"{row.late_steps} of {steps}" if row.sometimes else "most"

    def lateness(row: StragglerRow) -> str:
        us = row.late_step_us if row.sometimes else row.lateness_us
        return time_text(us) + ("?" if row.unsure else "")

    columns: Columns = {
        "rank": "rank",
        "times last": "collectives_last",
        "share": "share",
        "late in steps": late_in,
        "typical lateness": lateness,
        "total": "lateness_us_total",
        "slower activity": "cause",
        "longer by": "cause_us",
    }
    return [f"Stragglers{' (steady steps)' if steps else ''}", table_of(rows, columns)]


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
    columns: Columns = {
        "root rank": "rank",
        "activity": lambda cause: (
            cause.activity if cause.peer is None else f"transfer from rank {cause.peer}"
        ),
        "operation": lambda cause: shorten(cause.name or "", _CAUSE_NAME),
        "direct": "direct_us",
        "propagated": "propagated_us",
        "slower": lambda cause: "" if cause.peer is None else time_text(cause.slower_us),
        "share": "share",
        "saves": _saves,
    }
    total = time_text(analysis.waiting.total_us)
    over = "a step" if analysis.summary.steps else "in total"
    return [
        Paragraph(f"Root causes of waiting (sums over ranks; {total} of waiting {over})"),
        table_of(causes[:_MAX_ROWS], columns, keys=3),
        *more(len(analysis.root_causes), min(len(causes), _MAX_ROWS)),
    ]


def _tensors(analysis: Analysis) -> Section:
    rows = [row for row in analysis.tensors if row.exposed_us is not None][:_MAX_ROWS]
    if not rows:
        return []
    columns: Columns = {
        "tensor": "name",
        "bytes": "bytes",
        "ready": "ready_us",
        "enqueued": "enqueue_us",
        "complete": "complete_us",
        "tensors in bucket": "bucket",
        "exposed": "exposed_us",
    }
    lines: Section = [
        "Most exposed tensors (medians, from the step's start)",
        table_of(rows, columns),
    ]
    without = sum(row.messages == 0 for row in analysis.tensors)
    if without:
        lines.append(
            f"  the gradients of {counted(without, 'parameter')} are in no message of these steps"
        )
    return lines + more(len(analysis.tensors), _MAX_ROWS)


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
    columns: Columns = {
        "operator": lambda row: kernel_text(row[0], _NAME),
        "shapes of inputs": lambda row: shorten(printable(row[1].shapes), _NAME),
        "count": lambda row: f"{row[1].count:,}",
        "total": lambda row: time_text(row[1].total_us),
        "mean": lambda row: time_text(row[1].mean_us),
    }
    lines: Section = [
        "Operators by the shapes of their inputs (all ranks)",
        table_of(rows[:_MAX_ROWS], columns, keys=2),
    ]
    return lines + more(len(rows), _MAX_ROWS)


def _device_steps(analysis: Analysis) -> Section:
    """The steps on the device's time, where the host runs ahead of it."""
    if host_ahead(analysis) is None:
        return []
    columns: Columns = {
        "launched in": lambda row: f"rank {row.rank}, step {row.step}",
        "device lag": "lag_us",
        "device period": "period_us",
        "compute": "compute_us",
        "comm": "comm_us",
        "overlap": "overlap_us",
        "copies": "copy_us",
    }
    lines: Section = [
        "Steps on the device (lag: after the launch on the host; period: until the next step)",
        table_of(analysis.device_steps[:_MAX_RANKS], columns),
    ]
    return lines + more(len(analysis.device_steps), _MAX_RANKS)


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


def _table(analysis: Analysis, measure: Measure[Any, Any]) -> Section:
    """The first rows of a measure under its title; nothing without rows or a table."""
    rows, table = getattr(analysis, measure.name), measure.table
    if not rows or table is None:
        return []
    shown = table.first(rows)
    return [table.title, table_of(shown, table.columns), *more(len(rows), len(shown))]
