"""The last activity of a rank: what was in progress at the end, or else what completed last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import KIND, NULL, NULL_NS, Columns, IntArray
from ddltrace.analyzer.events.superseded import drop_superseded
from ddltrace.tracer.trace.schema import EVENTS, P2P_OPS

if TYPE_CHECKING:
    from ddltrace.analyzer.measures.process_ends import ProcessLifetimes
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.trace.run_info import Silence

_ACTIVITY_KINDS: Final = ("phase", "layer", "data", "wait", "codec", "marker")
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")


class LastActivity(NamedTuple):
    """The last activity of a rank.

    Attributes:
        text: The activity as the rest of a sentence about the rank.
        recorded_ns: Time of its last event, on rank 0's clock; None without events.
    """

    text: str
    recorded_ns: int | None


def last_activity(trace: Trace, lifetimes: ProcessLifetimes, rank: int, at_ns: int) -> LastActivity:
    """Returns the last activity of a rank: the one in progress at the end, or else the last one.

    Args:
        trace: The job's.
        lifetimes: The life spans of the trace's processes.
        rank: A rank with events.
        at_ns: A time at which the process in question ran, on rank 0's clock.
    """
    columns = _last_events(trace, rank, *lifetimes.of(rank, at_ns))
    rows = columns.rows(*_ACTIVITY_KINDS, "message")
    latest = _latest(columns)
    row = None
    if len(rows):
        still_open = rows[columns.unfinished[rows]]
        # The oldest open event: later ones in other streams wait for it.
        row = int(still_open[0] if len(still_open) else rows[np.argmax(latest[rows])])
    silence = _silence(trace, rank, latest)
    what = "did nothing that was recorded" if row is None else _event_text(columns, row)
    if silence is not None:
        if row is not None and columns.unfinished[row]:
            what = f"{what}, at {_place(silence['stack'])}"
        else:
            what = at_place(silence)
    return LastActivity(what, int(latest.max()) if len(latest) else None)


def last_silence(trace: Trace, rank: int) -> Silence | None:
    """Returns the last silence of a rank; None if the rank has recorded events since."""
    return _silence(trace, rank, _latest(_last_events(trace, rank, NULL_NS, None)))


def at_place(silence: Silence) -> str:
    """Describes a silence as the end of a sentence about its rank."""
    step = "" if silence["step"] is None else f" of step {silence['step']}"
    return f"is at {_place(silence['stack'])}, phase {silence['phase']}{step}"


def _last_events(trace: Trace, rank: int, after_ns: int, until_ns: int | None) -> Columns:
    """Returns the events that determine a rank's last activity, searched window by window.

    Reads all messages and open events, and the last event of each window, that began within some
    time.
    """
    kept = [EVENTS.empty_table()]
    for table in trace.last_windows(rank):
        start = Columns(table).start
        meant = (start > after_ns) & (start <= (start if until_ns is None else until_ns))
        columns = Columns(table.filter(meant))
        latest = _latest(columns)
        wanted = columns.unfinished | (columns.kind == KIND["message"])
        for rows in (columns.rows(*_ACTIVITY_KINDS), np.arange(len(columns))):
            if len(rows):
                wanted[rows[np.argmax(latest[rows])]] = True
        kept.append(columns.table(np.flatnonzero(wanted)))
    return Columns(drop_superseded(pa.concat_tables(kept).unify_dictionaries()))


def _latest(columns: Columns) -> IntArray:
    """For each event, its end, or its start if it has not ended."""
    return np.maximum(columns.end, columns.start)


def _silence(trace: Trace, rank: int, latest: IntArray) -> Silence | None:
    """Returns the silence of a rank if it was noticed after all its events; else None."""
    info = next((info for info in reversed(trace.run.ranks) if info.rank == rank), None)
    if info is None or info.silence is None or not info.silence["stack"]:
        return None
    last = int(latest.max(initial=NULL_NS))
    return info.silence if trace.moment(info, info.silence["noticed_ns"]) >= last else None


def _place(stack: Sequence[str]) -> str:
    """Returns the innermost frame of the job's own code, else the innermost frame."""
    frame = next((f for f in stack if not any(part in f for part in _LIBRARIES)), stack[0])
    path, _, function = frame.rpartition(" ")
    return f"{PurePath(path).name} ({function})"


def _event_text(columns: Columns, row: int) -> str:
    at: IntArray = np.array([row])

    def word(column: str) -> str:
        codes, words = columns.codes(column, at)
        return "" if codes[0] == NULL else words[codes[0]]

    what = f"{word('kind')} {word('op') or word('name')}".strip()
    step, unfinished = int(columns.step[row]), bool(columns.unfinished[row])
    peer, number, tag = (int(columns.ints(name)[row]) for name in ("peer", "seq", "tag"))
    if word("op") in P2P_OPS:
        what += "" if peer == NULL else f" {'to' if word('op') == 'send' else 'from'} rank {peer}"
        what += "" if tag in (NULL, 0) else f", tag {tag}"
    elif unfinished and number != NULL:
        what += f" number {number} of group {word('group')}"
    verb = "is in" if unfinished else "last recorded"
    return f"{verb} {what}{'' if step == NULL else f' of step {step}'}"
