"""The summary sentences of a report: time breakdown, cause and proposed change.

A share "on the critical path" is of the time between the first start and the last end of the steps,
one that "a rank spends on average" is of the steps of every rank; nothing else is said to be a
share of a step.
"""

from __future__ import annotations

from ddltrace.analyzer.events.process_stops import STOPPED
from ddltrace.analyzer.findings.advice import (
    cause_text,
    collections_text,
    path_shares,
    root_cause_text,
    share_of_collectives,
)
from ddltrace.analyzer.formatting.text_table import shorten
from ddltrace.analyzer.formatting.units import count_text, printable, share_text, time_text
from ddltrace.analyzer.measures.failures import Failure
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.goodput import Goodput
from ddltrace.analyzer.measures.hangs import Hang, Mismatch, Standstill, stuck_ranks
from ddltrace.analyzer.measures.path_parts import PathPart
from ddltrace.analyzer.measures.slow_steps import SlowStep
from ddltrace.analyzer.measures.stragglers import StragglerRow, delays_others
from ddltrace.analyzer.measures.summary import OVERLAPPING, Summary
from ddltrace.analyzer.measures.trace_facts import TraceFacts
from ddltrace.analyzer.model import Analysis
from ddltrace.tracer.exit_status import signal_name, status_text
from ddltrace.tracer.number_text import agreeing, counted
from ddltrace.tracer.trace.completeness import NOTHING_RECORDED, listed

_NAMES = {
    "compute": "compute",
    "transfer": "transfer of messages",
    "wait": "unexplained waiting",
    "update": "the optimizer's update",
    "data": "data loading",
    "copy": "device copies",
    "host": "host code",
    "idle": "idle",
}
_SHOWN_PARTS = 3
_WAITING_WORTH_SAYING = 0.02
_MAIN_CAUSE = 0.25
_WORTH_SAYING = 0.1
_SHOWN_ACTIVITIES = 3
_SHOWN_CALLS = 4
_SHOWN_SILENCE_US = 1000.0
_SHOWN_NAME = 40
_SLOWED = 1.03
_MAIN_SHARE = 0.5
_SHOWN_SHARE = 0.0005  # below, it would be written as 0.0 %


def sentences(analysis: Analysis) -> tuple[str, ...]:
    """Returns three sentences, preceded by others if the job failed or hangs. Safe to print."""
    failure = [] if analysis.failure is None else [_failure(analysis.failure)]
    hang = []
    if analysis.hangs:
        first, more = analysis.hangs[0], len(analysis.hangs) - 1
        in_circle = bool(first.missing) and stuck_ranks(analysis.hangs).issuperset(first.missing)
        circle = "Ranks wait for each other: " if in_circle else ""
        others = f"; {counted(more, 'more message', 'hangs')}" if more else ""
        hang = [f"{circle}{hang_text(first)}{others}."]
    elif analysis.standstill is not None:
        hang = [_standstill(analysis.standstill)]
    if not analysis.trace.ranks:
        return (*failure, *_nothing(analysis.trace))
    return (*failure, *hang, where_text(analysis), _cause(analysis), _advice(analysis))


def goodput_text(goodput: Goodput, status: str) -> str:
    """How long a job of some status took, and how often it was restarted."""
    time = time_text(goodput.wall_us)
    if not goodput.whole_job:
        text = f"The recorded part of the job took {time}"
    elif status == "running":
        text = f"The job has run for {time} since the launcher's start"
    else:
        text = f"The job took {time} from the launcher's start to its end"
    if not goodput.restarts:
        return f"{text}."
    again = "it is not known how many steps were executed again"
    if goodput.lost_steps is not None:
        again = f"{counted(goodput.lost_steps, 'step', 'was')} executed again"
    return f"{text}, with {counted(goodput.restarts, 'restart')}; {again}."


def _nothing(trace: TraceFacts) -> tuple[str, ...]:
    """The sentences on a trace of no rank; the notes have the likely reason."""
    if trace.status == "running":
        return (
            "No process of the job has joined a process group yet: nothing is recorded so far.",
        )
    return (
        f"{NOTHING_RECORDED[0].upper()}{NOTHING_RECORDED[1:]}.",
        "Record a training that calls init_process_group: ddltrace run -- torchrun train.py",
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Formats a list of ranks: ``rank 3``, ``ranks 0, 1 and 6 more``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}"


def extra_text(row: SlowStep) -> str:
    """Formats a slow step's largest extra time: ``data +31.2 ms, rank 1``. Safe to print."""
    grown = next((part for part in row.extra if part.rank is not None), None)
    if grown is None:
        return "not known"
    name = "" if grown.name is None else f" ({shorten(printable(grown.name), _SHOWN_NAME)})"
    return f"{grown.category} +{time_text(grown.us)}, rank {grown.rank}{name}"


def idle_text(summary: Summary) -> str:
    """Formats the idle time of the run by cause, largest first; empty if it is not known."""
    idle = summary.idle
    causes = [
        (idle.data_share, "waiting for data"),
        (idle.other_rank_share, "waiting for another rank"),
        (idle.message_share, "waiting for a message"),
        (idle.host_share, "while the host runs other code"),
        (idle.stopped_share, "while the process was stopped"),
        (idle.unknown_share, "for reasons that the trace does not show"),
    ]
    known = sorted(
        ((share, what) for share, what in causes if share and share >= _SHOWN_SHARE), reverse=True
    )
    if not known:
        return ""
    over = "a step" if summary.steps else "the traced time"
    listed = _listed([f"{share_text(share)} {what}" for share, what in known])
    why = f" {known[0][1]}" if len(known) == 1 else f": {listed}"
    beside = ""
    if (idle.in_message_share or 0.0) >= _SHOWN_SHARE:
        waits = share_text(idle.in_message_share)
        beside = f" In another {waits}, it only waits for other ranks inside messages."
    return f"On average, a rank is idle {share_text(summary.idle_share)} of {over}{why}.{beside}"


def throughput_of(summary: Summary) -> list[tuple[str, str, str]]:
    """What is known of the throughput: what it is, its value, and a remark."""
    counts = [
        ("samples per second", summary.samples_per_s, "Of all ranks that load data."),
        (
            "tokens per second",
            summary.tokens_per_s,
            "Of all ranks that load data, including padding.",
        ),
        (
            "FLOP per step of a rank",
            summary.flops_per_step,
            "Of its matrix multiplications, convolutions and attention.",
        ),
    ]
    found = [(what, count_text(count), remark) for what, count, remark in counts if count]
    if summary.mfu is not None:
        found.append(("MFU", share_text(summary.mfu), "FLOPS utilization: share of the peak."))
    return found


def dimensions_text(summary: Summary) -> str:
    """Says how to read the table of parallel dimensions."""
    over = "rank and steady step" if summary.steps else "rank over the traced time"
    return (
        f"Means per {over}; exposed: not hidden by compute. Rows can share time, because messages "
        "of several dimensions can be in flight at once."
    )


def communication_text(analysis: Analysis) -> str:
    """Says how much of a step is communication that nothing hides; empty if it is not known."""
    summary = analysis.summary
    if summary.exposed_comm_share is None:
        return ""
    over = "a step" if summary.steps else "the traced time"
    text = (
        f"On average, a rank spends {share_text(summary.exposed_comm_share)} of {over} in exposed "
        "communication"
    )
    if summary.sync_overhead_share is not None:
        waiting = share_text(summary.sync_overhead_share)
        text += f", and {waiting} waiting for others without computing"
    if summary.overlap_ratio is not None:
        hidden = share_text(summary.overlap_ratio)
        text += f"; compute hides {hidden} of the time in which messages are in flight"
    return f"{text}."


def tensors_text(analysis: Analysis) -> str:
    """Names the tensor whose message is exposed longest; empty if none is."""
    row = max(analysis.tensors, key=lambda each: each.exposed_us or 0.0, default=None)
    if row is None or not row.exposed_us:
        return ""
    return (
        f"The tensor whose communication is exposed longest is {printable(row.name)}: "
        f"{time_text(row.exposed_us)} a step (median)."
    )


def hang_text(hang: Hang) -> str:
    """Describes a hang and its present and missing ranks, without the full stop. Safe to print."""
    number = "" if hang.seq is None else f" number {hang.seq}"
    what = f"{printable(hang.op)}{number} of group {printable(hang.group)}"
    if hang.called:
        what = f"Number{number.removeprefix(' number')} of group {printable(hang.group)}"
    why = [f"ranks disagree on what it is: {_by_rank(hang.called)}"] if hang.called else []
    if hang.passed:
        why.append(f"ranks disagree on what they pass: {_by_rank(hang.passed)}")
    if hang.completed:
        why.append(f"it completed on {ranks_text(hang.completed)} only")
    inside = tuple(rank for rank in hang.entered if rank not in hang.completed)
    if not (hang.missing or hang.unknown or why):
        return f"{what} never completed although all its ranks entered it{_waited(hang)}"
    presence = f"{ranks_text(inside)} entered it{_waited(hang)}"
    if hang.missing:
        missing = set(hang.missing)
        doing = [(rank, text) for rank, text in hang.doing.items() if rank in missing]
        activities = "; ".join(
            f"rank {rank} {printable(text)}" for rank, text in doing[:_SHOWN_ACTIVITIES]
        )
        presence += f", {ranks_text(hang.missing)} never did"
        presence += f" ({activities})" if activities else ""
    if hang.unknown:
        presence += f"; whether {ranks_text(hang.unknown)} did is not recorded"
    return f"{what} hangs: {'; '.join([*why, presence])}"


def mismatch_text(mismatch: Mismatch) -> str:
    """Describes a completed message on which ranks disagree. Safe to print."""
    number = "" if mismatch.seq is None else f" number {mismatch.seq}"
    what = "" if mismatch.called else printable(mismatch.op)
    return (
        f"{what}{number} of group {printable(mismatch.group)}".strip()
        + f": {_by_rank(mismatch.called or mismatch.passed)}"
    )


def _by_rank(texts: dict[int, str]) -> str:
    """What each rank did, ranks that did the same together, the fewest first."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(printable(text), []).append(rank)
    groups = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
    more = f" and {len(groups) - _SHOWN_CALLS} more" if len(groups) > _SHOWN_CALLS else ""
    shown = [f"{ranks_text(tuple(who))} {text}" for text, who in groups[:_SHOWN_CALLS]]
    return ", ".join(shown) + more


def _waited(hang: Hang) -> str:
    timeout = ""
    if hang.timeout_us is not None:
        timeout = f" (the group's timeout is {time_text(hang.timeout_us)})"
    if hang.waited_us is None:
        return f", for how long is not known{timeout}"
    least = f"at least {time_text(hang.waited_us)}{timeout}"
    return f" for {least if hang.waited_at_least else time_text(hang.waited_us)}"


def _failure(failure: Failure) -> str:
    how = "ended without closing its trace"
    if failure.exit_status is not None:
        verb = "was" if signal_name(failure.exit_status) else "ended with"
        how = f"{verb} {status_text(failure.exit_status)}"
    before = "" if failure.before_us is None else f", {time_text(failure.before_us)} before others"
    doing = printable(failure.doing)
    doing = f"was {doing.removeprefix('is ')}" if doing.startswith("is ") else doing
    since = ""
    if doing.startswith("last") and (failure.silent_us or 0) >= _SHOWN_SILENCE_US:
        since = f", {time_text(failure.silent_us)} before its end"
    attempt = "" if failure.attempt is None else f" of attempt {failure.attempt}"
    return f"Rank {failure.rank}{attempt} {how}{before}: it {doing}{since}."


def _standstill(standstill: Standstill) -> str:
    where: dict[str, list[int]] = {}
    for rank, text in standstill.doing.items():
        where.setdefault(printable(text).removeprefix("is "), []).append(rank)
    # The rank that differs from the others comes first.
    places = sorted(where.items(), key=lambda item: (len(item[1]), item[1]))[:_SHOWN_ACTIVITIES]
    places_text = "; ".join(f"{ranks_text(tuple(ranks))} {text}" for text, ranks in places)
    waited = "" if standstill.waited_us is None else f" for {time_text(standstill.waited_us)}"
    more = len(where) - len(places)
    return (
        f"No rank has recorded anything{waited}: {places_text}{f' ({more} more)' if more else ''}."
    )


def where_text(analysis: Analysis) -> str:
    """Says where the time of a step goes, along the critical path. Safe to print."""
    summary = analysis.summary
    if not analysis.trace.events:
        return "The trace has no events."
    if summary.step_us.p50 is None:
        own = analysis.trace.source == "ddltrace"
        none = "No optimizer step was completed" if own else "The trace shows no steps"
        shares = [
            (summary.compute_share, "compute"),
            (summary.exposed_comm_share, "exposed communication"),
            (summary.idle_share, "idle"),
        ]
        known = [f"{share_text(share)} {name}" for share, name in shares if share is not None]
        if not known:
            return f"{none}; of the traced time: {_in_flight(analysis)}."
        said = _listed(known)
        return f"{none}. A rank spends, on average, these shares of the traced time: {said}."
    shares_of_path = sorted(path_shares(analysis).items(), key=lambda item: -item[1])
    names = dict(_NAMES)
    if any(map(_is_stop, analysis.critical_path)):
        names["idle"] = "a stopped process"
    parts = [f"{share_text(s)} {names[name]}" for name, s in shares_of_path[:_SHOWN_PARTS] if s]
    overlap = summary.overlap_ratio
    hidden = (
        f"; compute hides {share_text(overlap)} of the time in which messages are in flight"
        if overlap is not None
        else ""
    )
    over = ", from its first start to its last end over all ranks"
    whole = f"mean{over if len(analysis.trace.ranks) > 1 else ''}"
    alone, together = summary.rank_step_us.mean, summary.step_us.mean
    if alone and together and alone < (1 - OVERLAPPING) * together:
        # A rank begins the next step while another is in this one.
        whole += f"; {time_text(alone)} on one rank"
    return (
        f"A step takes {time_text(together)} ({whole}). "
        f"On the critical path: {_listed(parts)}{hidden}."
    )


def _in_flight(analysis: Analysis) -> str:
    """Summarizes a job whose compute was not recorded, by its time in communication."""
    wall_us = float(analysis.rank_steps["wall_ns"].sum()) / 1e3
    if not wall_us:
        return "nothing was recorded"
    known = [row.comm_us for row in analysis.ranks if row.comm_us is not None]
    if not known:
        return "neither the times of messages nor compute were recorded"
    comm = sum(known) / wall_us
    wait = sum(row.wait_us or 0.0 for row in analysis.ranks) / wall_us
    return (
        f"{share_text(comm)} with messages in flight, {share_text(wait)} waiting in messages that "
        "another rank has not entered (compute was not recorded)"
    )


def _slowed_by_stragglers(analysis: Analysis) -> str:
    """How much stragglers slow the job, and which; empty if they do not, or if it is unknown."""
    ideal = analysis.ideal_job
    if ideal is None or ideal.slowdown < _SLOWED:
        return ""
    reasons = [
        (ideal.m_w or 0.0, f"{ranks_text(ideal.slowest_ranks)} had ideal times"),
        (ideal.m_s or 0.0, "the last pipeline stage had ideal times"),
    ]
    share, reason = max(reasons)
    # The two shares can sum to more than the whole, and one alone can exceed it.
    gone = "all" if share >= 1 else share_text(share)
    why = f"{gone} of this would be gone if {reason}"
    if share < _MAIN_SHARE:
        why = "neither few slow ranks nor a slow last pipeline stage explain most of this"
    return f"Stragglers slow the job by {share_text(ideal.slowdown - 1)}: {why}."


def _cause(analysis: Analysis) -> str:
    said = _stopped(analysis) or _slowed_by_stragglers(analysis) or _waiting(analysis)
    if said:
        return said
    parts = [part for part in analysis.critical_path if part.name is not None]
    if parts:
        top = parts[0]
        others = _others(analysis)
        return (
            f"{others}The largest part of the critical path is {printable(top.name)} "
            f"({top.category}, rank {top.rank}): {time_text(top.us)} a step."
        )
    row = analysis.collectives[0] if analysis.collectives else None
    if row is not None and row.transfer_us_total is not None:
        return (
            f"The longest total transfer is that of {printable(row.op)} of group "
            f"{printable(row.group)}: {time_text(row.transfer_us_total)} in "
            f"{counted(row.count, 'call')}."
        )
    return "No collective was completed by all its ranks."


def _stopped(analysis: Analysis) -> str:
    """The rank whose process was stopped, if that is the first finding and on the path."""
    first = analysis.findings[0].kind if analysis.findings else None
    parts = [part for part in analysis.critical_path if _is_stop(part)]
    if first != "stopped" or not parts:
        return ""
    return (
        f"The process of rank {parts[0].rank} was stopped: {share_text(parts[0].share)} of the "
        f"critical path, {time_text(parts[0].us)} a step (mean)."
    )


def _is_stop(part: PathPart) -> bool:
    return part.category == "idle" and part.name == STOPPED


def _waiting(analysis: Analysis) -> str:
    """The rank that others wait for, and the reason; empty if there is none."""
    if analysis.waiting.is_point_to_point:
        began = _where_waiting_began(analysis)
        if began:
            return began
    worst = analysis.stragglers[0] if analysis.stragglers else None
    sync = analysis.summary.sync_overhead_share or 0.0
    if worst is None or sync < _WAITING_WORTH_SAYING or worst.unsure:
        return ""
    culprit = delays_others(analysis.stragglers, len(analysis.trace.ranks))
    if culprit is None:
        return (
            f"{_waiting_on_a_rank(sync)}. No single rank delays the others: rank {worst.rank}, "
            f"with the largest total lateness, enters {share_text(worst.share)} of its collectives "
            "last."
        )
    # A rank that is late without a reason of its own may itself have waited for another.
    began = "" if culprit.cause else _where_waiting_began(analysis)
    if began:
        return began
    if culprit.sometimes:
        how = (
            f"is late mainly in {culprit.late_steps} of {analysis.summary.steps} steps, by "
            f"{time_text(culprit.late_step_us)} (median)"
        )
    else:
        how = (
            f"enters {share_of_collectives(culprit.share)} last, "
            f"{time_text(culprit.lateness_us)} after the others (median)"
        )
    why = _why(analysis, culprit)
    return f"Rank {culprit.rank} {how}{why}. {_waiting_on_a_rank(sync)}."


def _waiting_on_a_rank(share: float) -> str:
    waits = f"{share_text(share)} of a step waiting for others without computing"
    return f"On average, a rank spends {waits}"


def _where_waiting_began(analysis: Analysis) -> str:
    """The root causes of waiting at sends and receives; empty if they are negligible."""
    mean = analysis.summary.step_us.mean
    whole = None if mean is None else mean * len(analysis.trace.ranks)
    if whole and analysis.waiting.total_us < _WAITING_WORTH_SAYING * whole:
        return ""
    cost = sum(cause.cost_us for cause in analysis.root_causes)
    main = [cause for cause in analysis.root_causes[:2] if cause.cost_us >= _MAIN_CAUSE * cost]
    if not main:
        return ""
    waiting = f"Ranks wait for each other, in total {time_text(analysis.waiting.total_us)} a step"
    reasons = [f"{share_text(cause.share)} because {root_cause_text(cause)}" for cause in main]
    return f"{waiting}: {' and '.join(reasons)}."


def _others(analysis: Analysis) -> str:
    """What precedes the sentence of a job without a rank that delays others."""
    known, world = len(analysis.trace.ranks), analysis.trace.world_size
    if known < world:
        return f"{world - known} of {world} ranks {agreeing(world - known, 'was')} not recorded. "
    if world == 1:
        return ""
    sync = analysis.summary.sync_overhead_share
    if sync is None:
        return "How long ranks wait for others is not known. "
    if sync >= _WAITING_WORTH_SAYING:  # who comes last is unsure, or nobody does
        return f"{_waiting_on_a_rank(sync)}; it is not known for which ranks. "
    return f"{_waiting_on_a_rank(sync)}. "


def _why(analysis: Analysis, row: StragglerRow) -> str:
    if row.cause is None:
        return "; the trace does not show why"
    if row.cause == "stopped":
        return f": its process is stopped for {time_text(row.cause_us)} in such a step"
    when = "in such a step" if row.sometimes else "a step"
    longer = f"takes {time_text(row.cause_us)} longer {when}{collections_text(row)}"
    return f": its {cause_text(analysis, row)} {longer}"


def _advice(analysis: Analysis) -> str:
    if not analysis.findings:
        if analysis.summary.step_us.p50 is None:
            return "No advice: it is based on steps, and the trace shows none."
        return "No known change is predicted to save 2 % of a step or more."
    # A faster model is proposed only if nothing else is left.
    others = [f for f in analysis.findings if f.kind != "compute" and f.share >= _WORTH_SAYING]
    first = analysis.findings[0]
    top = others[0] if others and first.has_saving else first
    text = printable(top.advice)
    if not top.has_saving:
        return f"To try: {text}."
    return f"To try (saves at most {time_text(top.saves_us)} a step): {text}."


def _listed(parts: list[str]) -> str:
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def predicted_text(finding: Finding) -> str:
    """What a replay predicts of a finding's strategies, in sentences; empty if nothing."""
    return " ".join(
        f"A replay of the last steps predicts {time_text(each.step_us)} a step with "
        f"{each.strategy} (90 % interval: {time_text(each.low_us)} to {time_text(each.high_us)}), "
        f"compared with {time_text(each.baseline_us)} as recorded."
        for each in finding.predicted
    )
