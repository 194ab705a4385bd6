"""What was clicked in the lane of the critical paths: where it is, and under which event."""

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
    """What the details panel shows of a piece of a critical path.

    Attributes:
        title: What the piece is.
        facts: Label and value, both fit to be shown.
        rank: Whose time it is; of a message: who waits for it.
        event: Row in that rank's events of what it is a part of; None where nothing is seen.
    """

    title: str
    facts: list[tuple[str, str]]
    rank: int
    event: int | None


def describe_piece(opened: OpenTrace, number: int) -> PieceDetails:
    """Looks one piece of the critical paths up.

    Raises:
        ValueError: There is no such piece.
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
