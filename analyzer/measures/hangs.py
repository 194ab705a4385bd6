"""Collectives that some ranks entered and that never completed: who is missing, since when."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.columns import KIND, NULL, NULL_NS, Columns, IntArray
from ddltrace.analyzer.join import Joined
from ddltrace.analyzer.model import Hang, Standstill, stuck_ranks
from ddltrace.analyzer.scan import RankScan
from ddltrace.analyzer.trace import drop_superseded
from ddltrace.tracer.schema import EVENTS, P2P_OPS

if TYPE_CHECKING:
    from ddltrace.analyzer.trace import Trace

_PATIENCE: Final = 10
"""In a job that still runs, a message is hung when it has been open for this many times the
longest that any other took, and for a second at least."""

_MIN_WAIT_NS: Final = 1_000_000_000
_USUAL: Final = 0.9
"""A job that was ended in the middle of its work had messages in flight, too: those that took no
longer than this part of the others, or a second, did not hang."""

_UNWRITTEN_NS: Final = 500_000_000
"""What a process that is killed has recorded in this time before may not be written; usual is
half of it."""

_MAX_SHOWN: Final = 20
_DOINGS: Final = ("phase", "layer", "data", "wait", "codec", "marker")
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")


def find_hangs(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, origin_ns: int
) -> tuple[Hang, ...]:
    """Finds what never completed, causes before what waits behind them.

    A member is *missing* when the trace has events of it and it never entered the collective,
    or never sent what another one waits to receive. While a job runs, some messages are in
    flight at any moment; those only count when they have been so for far too long. One that
    failed after a long wait hung, too, until its rank gave up. What a rank did last is not
    written if it was killed: then nobody knows whether its last message ended, or a next one began.
    """
    messages, collectives = joined.messages, joined.collectives
    timed = messages.end != NULL_NS
    gave_up = messages.failed & timed & (messages.end - messages.start >= _MIN_WAIT_NS)
    is_open = messages.unfinished | gave_up
    found = np.unique(joined.collective[is_open & (joined.collective != NULL)])
    lonely = np.flatnonzero(
        is_open & messages.is_p2p & (joined.partner == NULL) & (messages.peer != NULL)
    )
    if not len(found) and not len(lonely):
        return ()
    now = _end_of_trace(trace, scans)
    worked = timed & ~gave_up
    durations = messages.end[worked] - messages.start[worked]
    if trace.run.status == "running":
        patience = max(_PATIENCE * int(durations.max(initial=0)), _MIN_WAIT_NS)
    else:
        usual = float(np.quantile(durations, _USUAL)) if len(durations) else 0.0
        patience = min(int(usual), _MIN_WAIT_NS)

    lives = Lives(trace)
    known = _Known(trace, scans, lives, now)

    def waited_us(rows: Iterable[int], since_ns: int) -> float | None:
        """How long the last rank is known to have waited: until it gave up, or its end."""
        ends = [
            int(messages.end[row])
            if timed[row]
            else known.until(int(messages.rank[row]), int(messages.start[row]))
            for row in rows
            if is_open[row]
        ]
        return max((max(0, end - since_ns) / 1e3 for end in ends if end is not None), default=None)

    def is_hang(waited: float | None) -> bool:
        return trace.run.status != "running" if waited is None else waited >= patience / 1e3

    hangs = []
    counts = np.diff(np.append(collectives.first_row, len(joined.order)))
    for i in found.tolist():
        last = int(collectives.last[i])
        rows = joined.order[collectives.first_row[i] : collectives.first_row[i] + counts[i]]
        group = int(collectives.group[i])
        called = {int(messages.rank[row]): messages.ops[messages.op[row]] for row in rows}
        waited = waited_us(rows, last)
        if not is_hang(waited):
            continue
        missing = set(messages.members[group] or trace.ranks) - set(called)
        if known.may_have_come(missing, last):
            continue
        hangs.append(
            Hang(
                op=messages.ops[collectives.op[i]],
                group=messages.groups[group],
                seq=int(collectives.seq[i]),
                entered=tuple(sorted(called)),
                missing=tuple(sorted(missing)),
                since_us=(last - origin_ns) / 1e3,
                waited_us=waited,
                called=dict(sorted(called.items())) if len(set(called.values())) > 1 else {},
            )
        )
    for row in lonely.tolist():
        start, rank = int(messages.start[row]), int(messages.rank[row])
        waited, peer = waited_us([row], start), int(messages.peer[row])
        if is_hang(waited) and not known.may_have_come([peer], start):
            hangs.append(
                Hang(
                    op=messages.ops[messages.op[row]],
                    group=messages.groups[messages.group[row]],
                    seq=None if messages.seq[row] == NULL else int(messages.seq[row]),
                    entered=(rank,),
                    missing=(peer,),
                    since_us=(start - origin_ns) / 1e3,
                    waited_us=waited,
                )
            )
    # A rank that hangs itself did not come because of that: not it is to be asked first.
    stuck = stuck_ranks(hangs)
    hangs.sort(
        key=lambda hang: (
            sum(rank in stuck for rank in hang.missing),
            -len(hang.missing),
            hang.since_us,
        )
    )
    return tuple(_with_doings(trace, lives, hang, stuck, origin_ns) for hang in hangs[:_MAX_SHOWN])


def has_lasted(hang: Hang) -> bool:
    """Whether ranks hung for so long that it is not only what the end of one has left behind."""
    return hang.waited_us is None or hang.waited_us * 1e3 >= _MIN_WAIT_NS


def find_standstill(trace: Trace, scans: Mapping[int, RankScan]) -> Standstill | None:
    """Finds out whether every rank has fallen silent, in a job that nobody has seen end."""
    infos = {info.rank: info for info in trace.run.ranks}
    if not infos or any(info.status == "complete" or not info.silence for info in infos.values()):
        return None
    doing, since = {}, []
    for rank in trace.ranks:
        silence = _silence(trace, rank, _latest(_last_events(trace, rank, NULL_NS, None)))
        if silence is None:
            return None
        doing[rank] = _at_place(silence)
        since.append(trace.moment(infos[rank], silence["since_ns"]))
    now = _end_of_trace(trace, scans)
    return Standstill(doing, None if now is None else max(now - max(since), 0) / 1e3)


def _with_doings(
    trace: Trace, lives: Lives, hang: Hang, stuck: frozenset[int], origin_ns: int
) -> Hang:
    at_ns = origin_ns + round(hang.since_us * 1e3)
    present = set(trace.ranks)
    missing = sorted(hang.missing, key=lambda rank: rank in stuck)
    shown = (*missing[:_MAX_SHOWN], *hang.entered[:_MAX_SHOWN])
    doings = {
        rank: doing(trace, lives, rank, at_ns).text if rank in present else "left no trace"
        for rank in shown
    }
    return Hang(**{**vars(hang), "doing": doings})


class Doing(NamedTuple):
    """What a rank did in the end.

    Attributes:
        text: As the rest of a sentence about it.
        recorded_ns: When the last was that it recorded, on rank 0's clock; None if nothing was.
    """

    text: str
    recorded_ns: int | None


def doing(trace: Trace, lives: Lives, rank: int, at_ns: int) -> Doing:
    """What a rank was in the middle of in the end, or what it did last.

    Args:
        trace: The job's.
        lives: Of its processes.
        rank: One of which something was recorded.
        at_ns: When it was the process that is meant, on rank 0's clock.
    """
    columns = _last_events(trace, rank, *lives.of(rank, at_ns))
    rows = columns.rows(*_DOINGS, "message")
    latest = _latest(columns)
    row = None
    if len(rows):
        still_open = rows[columns.unfinished[rows]]
        # The oldest that is open: what came after it in other streams waits behind it.
        row = int(still_open[0] if len(still_open) else rows[np.argmax(latest[rows])])
    silence = _silence(trace, rank, latest)
    what = "did nothing that was recorded" if row is None else _event_text(columns, row)
    if silence is not None:
        if row is not None and columns.unfinished[row]:
            what = f"{what}, at {_place(silence['stack'])}"
        else:
            what = _at_place(silence)
    return Doing(what, int(latest.max()) if len(latest) else None)


def _at_place(silence: Mapping[str, Any]) -> str:
    step = "" if silence["step"] is None else f" of step {silence['step']}"
    return f"is at {_place(silence['stack'])}, phase {silence['phase']}{step}"


def _last_events(trace: Trace, rank: int, after_ns: int, until_ns: int | None) -> Columns:
    """Those events of a rank that tell what it did last, found a window at a time.

    All its messages, what had not ended, and of each window what ended last; of those that began
    within some time.
    """
    kept = [EVENTS.empty_table()]
    for table in trace.windows(rank):
        start = Columns(table).start
        meant = (start > after_ns) & (start <= (start if until_ns is None else until_ns))
        columns = Columns(table.filter(meant))
        latest = _latest(columns)
        wanted = columns.unfinished | (columns.kind == KIND["message"])
        for rows in (columns.rows(*_DOINGS), np.arange(len(columns))):
            if len(rows):
                wanted[rows[np.argmax(latest[rows])]] = True
        kept.append(columns.table(np.flatnonzero(wanted)))
    return Columns(drop_superseded(pa.concat_tables(kept).unify_dictionaries()))


def _latest(columns: Columns) -> IntArray:
    """Of each event, when it ended, or began if it has not."""
    return np.maximum(columns.end, columns.start)


def _silence(trace: Trace, rank: int, latest: IntArray) -> dict[str, Any] | None:
    """What the rank was seen to do after all its events."""
    info = next((info for info in reversed(trace.run.ranks) if info.rank == rank), None)
    if info is None or info.silence is None or not info.silence["stack"]:
        return None
    last = int(latest.max(initial=NULL_NS))
    return info.silence if trace.moment(info, info.silence["noticed_ns"]) >= last else None


def _place(stack: Sequence[str]) -> str:
    """The innermost frame of the job's own code, else the innermost at all."""
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


class Lives:
    """When the processes of each rank ended, on rank 0's clock, where somebody saw it."""

    def __init__(self, trace: Trace) -> None:
        self._ends: dict[int, list[int]] = {}
        for info in trace.run.ranks:
            if info.ended_ns is not None:
                self._ends.setdefault(info.rank, []).append(trace.moment(info, info.ended_ns))

    def of(self, rank: int, at_ns: int) -> tuple[int, int | None]:
        """The process that was a rank at a moment: when the one before it ended, and when it did.

        Returns:
            Both; the smallest integer and None where there is none, or nobody saw it.
        """
        ends = self._ends.get(rank, [])
        before = max((end for end in ends if end < at_ns), default=NULL_NS)
        return before, min((end for end in ends if end >= at_ns), default=None)


class _Known:
    """Until when it is known what ranks did: of one that was killed, the last is not written.

    Args:
        trace: The job's.
        scans: Of its ranks.
        lives: Of its processes.
        now: When the job ended, if that is known.
    """

    def __init__(
        self, trace: Trace, scans: Mapping[int, RankScan], lives: Lives, now: int | None
    ) -> None:
        self._lives = lives
        self._now = now
        self._written: dict[int, int] = {}  # of ranks whose last process was killed
        for info in trace.run.ranks:
            self._written.pop(info.rank, None)
            if info.status == "killed" and info.rank in scans:
                seen = [scans[info.rank].last]
                if info.silence is not None:
                    seen.append(trace.moment(info, info.silence["noticed_ns"]))
                self._written[info.rank] = max(seen)

    def until(self, rank: int, at_ns: int) -> int | None:
        """The time until which it is known that what a rank was in at a moment went on."""
        _, ended = self._lives.of(rank, at_ns)
        written = self._written.get(rank)
        if written is None:
            return self._now if ended is None else ended
        return written if ended is None else max(written, ended - _UNWRITTEN_NS)

    def may_have_come(self, ranks: Iterable[int], since_ns: int) -> bool:
        """Whether nobody knows of one of some ranks what it did from a moment on."""
        return any(
            self._written.get(rank, since_ns) < since_ns
            and self._lives.of(rank, since_ns)[1] is None
            for rank in ranks
        )


def _end_of_trace(trace: Trace, scans: Mapping[int, RankScan]) -> int | None:
    """When the job ended, or now if it runs, on rank 0's clock; None if nothing tells.

    If nobody saw it end: the last that was seen of it.
    """
    run = trace.run
    ended, host = run.ended_unix_ns, run.host
    if ended is None and run.status == "running":
        ended, host = time.time_ns(), platform.node()
    if ended is not None:
        # Hosts' clocks on the wall differ: best is a rank where that one was read.
        for info in sorted(run.ranks, key=lambda info: info.host != host):
            unix, monotonic = info.clock.get("unix_ns"), info.clock.get("monotonic_ns")
            if isinstance(unix, int) and isinstance(monotonic, int):
                return trace.moment(info, ended - unix + monotonic)
    silences = [(info, info.silence) for info in run.ranks if info.silence is not None]
    seen = [trace.moment(info, silence["noticed_ns"]) for info, silence in silences]
    return max([*seen, *(scan.last for scan in scans.values())], default=None)
