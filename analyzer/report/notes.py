"""Notes on problems that affect an analysis: one list for all reports and views."""

from __future__ import annotations

import statistics
from typing import Final

from ddltrace.analyzer.formatting.units import time_text
from ddltrace.analyzer.measures.trace_facts import TraceFacts
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.report.sentences import mismatch_text
from ddltrace.tracer.number_text import agreeing, counted

_SHOWN_MISMATCHES: Final = 3
_AHEAD: Final = 0.5
"""Of a step: by how much the device is behind where the difference matters."""


def state_text(trace: TraceFacts) -> str:
    """Describes whether a trace is complete: ``partial; the job ended with status 1``."""
    failed = f"; the job ended with status {trace.exit_status}" if trace.exit_status else ""
    return f"{trace.status}{failed}"


def notes_of(analysis: Analysis) -> list[str]:
    """Returns the notes of the trace, and those on joining its messages across ranks."""
    notes = list(analysis.trace.notes)
    joining = analysis.joining
    if joining.mismatched:
        notes.append(
            f"ranks disagree on operation or size of {counted(joining.mismatched, 'collective')}: "
            "left out of all times"
        )
    notes += [
        f"ranks disagree on a message that completed: {mismatch_text(each)}"
        for each in analysis.mismatches[:_SHOWN_MISMATCHES]
    ]
    if joining.partial:
        notes.append(
            f"{joining.partial} of {joining.collectives} collectives "
            f"{agreeing(joining.partial, 'lacks')} the record of some rank"
        )
    if joining.p2p_unmatched:
        lack = "send or receive lacks" if joining.p2p_unmatched == 1 else "sends and receives lack"
        notes.append(f"{joining.p2p_unmatched} {lack} the record of the other side")
    if joining.by_order:
        notes.append("collectives carry no sequence numbers: joined by operation, size and order")
    notes += _notes_on_clocks(analysis)
    ahead = host_ahead(analysis)
    return [*notes, ahead] if ahead else notes


def _notes_on_clocks(analysis: Analysis) -> list[str]:
    """Says which messages have times that are less exact than the others, or none."""
    clocks = [row.clocks for row in analysis.ranks]
    messages = sum(row.messages for row in analysis.ranks)
    polled, replayed = (sum(getattr(c, name) for c in clocks) for name in ("polling", "graph"))
    notes = []
    if polled:
        notes.append(
            f"the ends of {polled} of {messages} messages were found by polling every 0.5 to 5 ms: "
            "they can be late by as much"
        )
    if replayed:
        notes.append(
            f"{replayed} of {messages} messages ran in replays of CUDA graphs, at unknown "
            "times: they do not count as communication time"
        )
    return notes


def host_ahead(analysis: Analysis) -> str | None:
    """Says where the device is most behind the host, and how long its steps are then."""
    rows = [row for row in analysis.device_steps if row.period_us]
    row = max(rows, key=lambda each: each.lag_us / (each.period_us or 1.0), default=None)
    if row is None or row.lag_us < _AHEAD * (row.period_us or 0.0):
        return None
    every = [each for each in analysis.device_steps if each.rank == row.rank]
    lag = statistics.mean(each.lag_us for each in every)
    comm = statistics.mean(each.comm_us for each in every)
    period = statistics.mean(each.period_us for each in every if each.period_us is not None)
    wall = next(each.step_us_p50 for each in analysis.ranks if each.rank == row.rank)
    return (
        f"the host runs ahead of the device: on rank {row.rank}, the work of a step begins "
        f"{time_text(lag)} after the step begins on the host. A step takes {time_text(wall)} on "
        f"the host (median) and {time_text(period)} on the device (mean), and launches "
        f"{time_text(comm)} of communication; all other tables count work in the step in which it "
        "runs"
    )
