"""Details of a piece of a critical path, and the event that contains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.formatting.units import instant_text, printable, share_text, time_text
from ddltrace.dashboard.timeline.tracks import NO_EVENT

if TYPE_CHECKING:
    from ddltrace.analyzer.joined.critical_path import PathPiece
    from ddltrace.dashboard.workspace import OpenTrace

_WORK: Final = ("compute", "device", "steps")


@dataclass(frozen=True)
class PieceDetails:
    """The content of the details panel for a piece of a critical path.

    Attributes:
        title: The activity of the piece.
        facts: Labels and values, escaped for display.
        rank: The rank whose time it is; for a message, the rank that waits for it.
        event: Row of the containing event in that rank's events; None if nothing was recorded.
    """

    title: str
    facts: list[tuple[str, str]]
    rank: int
    event: int | None


def describe_piece(opened: OpenTrace, number: int) -> PieceDetails:
    """Looks up one piece of the critical paths.

    Raises:
        ValueError: The piece does not exist.
    """
    lane = opened.path_lane
    step, path, piece = lane.piece(number)
    length = piece.end_ns - piece.start_ns
    whole = int(path.end[-1] - path.start[0])
    facts = [
        ("Rank", str(piece.rank)),
        ("Category", piece.category),
        ("Duration", time_text(length / 1e3)),
        ("Share of the step", share_text(length / whole)),
        ("Start", instant_text((piece.start_ns - lane.origin_ns) / 1e3)),
        ("Step", str(step)),
    ]
    title = printable(piece.name or piece.category)
    return PieceDetails(title, facts, piece.rank, _event_of(opened, piece))


def _event_of(opened: OpenTrace, piece: PathPiece) -> int | None:
    """The event that a piece is a part of: its message, or the innermost of its rank's work."""
    origin = opened.trace.origin_ns
    if piece.message is not None:
        entered = int(opened.analyzed.joined.messages.start[piece.message]) - origin
        return _around(opened, piece.rank, ("communication",), entered, starts=True)
    middle = (piece.start_ns + piece.end_ns) // 2 - origin
    return _around(opened, piece.rank, _WORK, middle)


def _around(
    opened: OpenTrace, rank: int, kinds: tuple[str, ...], time: int, *, starts: bool = False
) -> int | None:
    """The shortest event around an instant, or one that starts at it; None if there is none."""
    timeline = opened.timeline
    found: list[tuple[int, int]] = []
    for track in timeline.tracks:
        if track.rank != rank or track.kind not in kinds:
            continue
        for row in timeline.rows[track.first_row : track.first_row + track.num_rows]:
            at = np.searchsorted(row.index.start, [time], side="right") - 1
            event = int(row.event[at[0]])
            if at[0] < 0 or event == NO_EVENT:
                continue
            exact = int(row.index.start[at[0]]) == time
            if exact if starts else int(row.index.end(at)[0]) > time:
                found.append((int(row.index.duration(at)[0]), event))
    return min(found)[1] if found else None
