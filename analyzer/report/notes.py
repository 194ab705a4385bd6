"""Notes on problems that affect an analysis: one list for all reports and views."""

from __future__ import annotations

from ddltrace.analyzer.model import Analysis, TraceFacts


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
            f"{joining.mismatched} collectives do not agree on operation or size across ranks: "
            "left out of all times"
        )
    if joining.partial:
        notes.append(f"{joining.partial} of {joining.collectives} collectives lack some rank")
    if joining.p2p_unmatched:
        notes.append(f"{joining.p2p_unmatched} sends and receives lack their other side")
    if joining.by_order:
        notes.append("collectives carry no sequence numbers: joined by operation, size and order")
    return notes
