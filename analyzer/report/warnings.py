"""Notes that commands without a report print on stderr, so that stdout holds data only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.trace.completeness import NOTHING_RECORDED

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace


def check_recorded(traces: Sequence[Trace]) -> None:
    """Checks that there is something to show.

    Raises:
        TraceError: A trace is one of a job that ended, and has no ranks.
    """
    from ddltrace.analyzer.formatting.units import printable

    for trace in traces:
        if not trace.ranks and trace.run.status != "running":
            raise TraceError(
                f"{printable(trace.name)}: {NOTHING_RECORDED} "
                f"(the likely reason: ddltrace analyze {shlex.quote(printable(str(trace.path)))})"
            )


def report_steps_left_out(trace: Trace) -> None:
    """Reports which steps of a long trace are not loaded."""
    selection = trace.step_selection
    if selection is not None and selection.note is not None:
        _report(trace, selection.note)


def report_ranges(trace: Trace, steps: range | None = None) -> None:
    """Reports that steps are analyzed in ranges, which takes long."""
    from ddltrace.analyzer.trace.step_selection import steps_in_ranges

    selection = steps_in_ranges(trace.step_selection, steps)
    if selection is not None:
        _report(
            trace,
            f"{selection.events:,} events: analyzing steps {selection.steps.start} to "
            f"{selection.steps.stop - 1} in {selection.ranges} ranges "
            "(--steps A:B analyzes only some steps)",
        )


def report_damage(trace: Trace) -> None:
    """Reports which of the event files read so far are damaged; call it after reading."""
    for note in trace.damage:
        _report(trace, note)


def _report(trace: Trace, note: str) -> None:
    from ddltrace.analyzer.formatting.units import printable

    click.echo(f"ddltrace: {printable(trace.name)}: {printable(note)}", err=True)
