"""What a reader must know before believing an analysis: one list for all that shows it."""

from __future__ import annotations

from ddltrace.analyzer.model import Analysis, TraceFacts


def state_text(trace: TraceFacts) -> str:
    """Whether a trace is whole: ``partial; the job ended with status 1``."""
    failed = f"; the job ended with status {trace.exit_status}" if trace.exit_status else ""
    return f"{trace.status}{failed}"


def notes_of(analysis: Analysis) -> list[str]:
    """The trace's notes, and those of how its messages were found on all their ranks."""
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
