"""Messages that never completed, with missing ranks and time, and on which ranks disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, Columns, IntArray, distinct
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.last_activity import at_place, last_activity, last_silence
from ddltrace.analyzer.measures.process_ends import KnownActivity, ProcessLifetimes, end_of_trace
from ddltrace.tracer.number_text import counted

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

DUMPS: Final = "flight-recorder"
"""Source of traces that show what was in flight when the ranks wrote them: whatever has not
completed in them is reported, since a dump does not tell how long it continued."""

_EQUAL_INPUTS: Final = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
_EQUAL_OUTPUTS: Final = ("all_reduce", "reduce_scatter", "all_gather")


def pairs_that_disagree(joined: Joined) -> dict[int, int]:
    """Sends and the receives for them that expect another size: rows of messages.

    Where as many sends as receives between two ranks of a group lack the other side, they are of
    each other, in their order.
    """
    messages = joined.messages
    found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    alone = np.flatnonzero(messages.is_p2p & (joined.partner == NULL) & (messages.peer != NULL))
    for row in alone[np.argsort(messages.start[alone], kind="stable")].tolist():
        rank, peer = int(messages.rank[row]), int(messages.peer[row])
        is_send = messages.ops[messages.op[row]] == "send"
        key = int(messages.group[row]), *((rank, peer) if is_send else (peer, rank))
        found.setdefault(key, ([], []))[0 if is_send else 1].append(row)
    return {
        send: receive
        for sends, receives in found.values()
        if len(sends) == len(receives)
        for send, receive in zip(sends, receives, strict=True)
        if messages.bytes[send] != messages.out_bytes[receive]
        and NULL not in (messages.bytes[send], messages.out_bytes[receive])
    }


def sent_and_expected(joined: Joined, send: int, receive: int) -> dict[int, str]:
    """What the two ranks of a pair passed, each by its rank."""
    messages = joined.messages
    return {
        int(messages.rank[send]): f"sends {counted(int(messages.bytes[send]), 'byte')}",
        int(messages.rank[receive]): (
            f"receives {counted(int(messages.out_bytes[receive]), 'byte')}"
        ),
    }


def passed_by(
    windows: Iterable[pa.Table], wanted: set[tuple[str, int | None]]
) -> dict[tuple[str, int | None], Passed]:
    """What a rank passed to the collectives with these groups and numbers.

    Args:
        windows: Events of the rank.
        wanted: Groups and numbers.
    """
    seqs = [seq for _, seq in wanted if seq is not None]
    found: dict[tuple[str, int | None], Passed] = {}
    for table in windows:
        columns = Columns(table)
        rows = columns.rows("message")
        rows = rows[np.isin(columns.ints("seq", rows), seqs)]
        (groups, names), (types, type_names), (shapes, shape_texts) = (
            columns.codes(name, rows) for name in ("group", "dtype", "shapes")
        )
        names, type_names, shape_texts = [*names, ""], [*type_names, ""], [*shape_texts, ""]
        sizes, out_sizes = columns.ints("bytes", rows), columns.ints("out_bytes", rows)
        for place, number in enumerate(columns.ints("seq", rows).tolist()):
            key = names[groups[place]], number
            if key in wanted:
                found[key] = Passed(
                    type_names[types[place]],
                    shape_texts[shapes[place]],
                    int(sizes[place]),
                    int(out_sizes[place]),
                )
    return found


class Passed(NamedTuple):
    """What a rank passed to a collective; empty, or `NULL`, where it is not known."""

    dtype: str
    shapes: str
    bytes: int
    out_bytes: int

    def text(self, *, with_output: bool) -> str:
        """Describes it: ``float32 [[64,4]]``."""
        size = self.shapes or ("" if self.bytes == NULL else f"{self.bytes} bytes")
        output = f", output of {self.out_bytes} bytes" if with_output else ""
        return f"{self.dtype} {size}".strip() + output


def disagreement(op: str, passed: Mapping[int, Passed]) -> dict[int, str]:
    """What each rank passed to an operation, if that must be equal and is not."""
    each = list(passed.values())
    types = {one.dtype for one in each if one.dtype} if op != "barrier" else set()
    # Without shapes it is not known which sizes a recorder writes on ranks that only receive.
    shaped = all(one.shapes for one in each)
    inputs = {one.bytes for one in each if one.bytes != NULL}
    outputs = {one.out_bytes for one in each if one.out_bytes != NULL}
    compared = _EQUAL_INPUTS if shaped else _EQUAL_INPUTS[:3]
    inputs_differ = op in compared and len(inputs) > 1
    outputs_differ = shaped and op in _EQUAL_OUTPUTS and len(outputs) > 1
    unbalanced = (
        op == "all_to_all"
        and shaped
        and NULL not in {size for one in each for size in (one.bytes, one.out_bytes)}
        and sum(one.bytes for one in each) != sum(one.out_bytes for one in each)
    )
    if len(types) < 2 and not (inputs_differ or outputs_differ or unbalanced):
        return {}
    with_output = unbalanced or (outputs_differ and not inputs_differ)
    return {rank: one.text(with_output=with_output) for rank, one in passed.items()}


_PATIENCE: Final = 10
"""In a job that still runs, a message is hung when it has been open for this many times the
longest that any other took, and for a second at least."""

_MIN_WAIT_NS: Final = 1_000_000_000
_USUAL: Final = 0.9
"""A job that was ended in the middle of its work had messages in flight, too: those that took no
longer than this part of the others, or a second, did not hang."""

_MAX_SHOWN: Final = 20


@dataclass(frozen=True)
class Hang:
    """A collective that some ranks entered and that never completed, or a send or receive
    whose other side never came.

    Attributes:
        op: Operation.
        group: Process group.
        seq: Its number in the group.
        entered: Ranks that are in it.
        missing: Members that never entered it.
        unknown: Members of which it is not known whether they entered it: they left no trace, or
            their part of it was lost.
        completed: Ranks of `entered` on which it completed.
        since_us: When the last of `entered` arrived, from the trace's origin.
        waited_us: How long they had waited when the trace ends; None if unknown.
        waited_at_least: Whether they may have waited for longer than `waited_us`: the end of their
            waiting was not observed.
        timeout_us: Timeout of the group; None if unknown.
        doing: The activity of each rank, by rank, first that of missing ranks that do not hang
            elsewhere.
        called: The operation that each rank called, by rank, where they disagree.
        passed: The element type and sizes that each rank passed, by rank, where they disagree.
    """

    op: str
    group: str
    seq: int | None
    entered: tuple[int, ...]
    missing: tuple[int, ...]
    since_us: float
    waited_us: float | None
    doing: dict[int, str] = field(default_factory=dict)
    called: dict[int, str] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)
    unknown: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    waited_at_least: bool = False
    timeout_us: float | None = None


def stuck_ranks(hangs: Iterable[Hang]) -> frozenset[int]:
    """The ranks that are in any of them."""
    return frozenset(rank for hang in hangs for rank in hang.entered)


@dataclass(frozen=True)
class Standstill:
    """A job in which all ranks have stopped recording events, without waiting for a message.

    Attributes:
        doing: The position of each rank, by rank.
        waited_us: Time since the last event of any rank at the end of the trace; None if unknown.
    """

    doing: dict[int, str]
    waited_us: float | None


def find_hangs(
    trace: Trace, scans: Mapping[int, RankScan], joined: Joined, origin_ns: int
) -> tuple[Hang, ...]:
    """Finds messages that never completed, causes first.

    A member is *missing* when the trace has events of it and it never entered the collective,
    or never sent what another one waits to receive. Without a trace of it, or if later collectives
    of the group were recorded but not this one, it is *unknown* whether it entered.

    While a job runs, some messages are in flight at any moment; those only count when they have
    been so for far too long. One that failed after a long wait hung, too, until its rank gave up.
    What a rank did last is not written if it was killed: then it is unknown whether its last
    message ended, or a next one began.
    """
    messages, collectives = joined.messages, joined.collectives
    timed = messages.end != NULL_NS
    gave_up = messages.failed & timed & (messages.end - messages.start >= _MIN_WAIT_NS)
    is_open = messages.unfinished | gave_up
    found = distinct(joined.collective[is_open & (joined.collective != NULL)])
    unmatched = np.flatnonzero(
        is_open & messages.is_p2p & (joined.partner == NULL) & (messages.peer != NULL)
    )
    if not len(found) and not len(unmatched):
        return ()
    end_of_all = end_of_trace(trace, scans)
    worked = timed & ~gave_up
    patience_us = _patience_ns(trace, messages.end[worked] - messages.start[worked]) / 1e3

    lifetimes = ProcessLifetimes(trace)
    known = KnownActivity(trace, scans, lifetimes, end_of_all)
    members = _Members(trace, joined)

    def waited_for(rows: Iterable[int], since_ns: int) -> _Waited:
        """How long the last rank is known to have waited: until it gave up, or until it ended."""
        best = _Waited(None, at_least=False)
        for row in rows:
            if not is_open[row]:
                continue
            end, observed = (
                (int(messages.end[row]), True)
                if timed[row]
                else known.until(int(messages.rank[row]), int(messages.start[row]))
            )
            if end is not None and (us := max(0, end - since_ns) / 1e3) >= (best.us or 0.0):
                best = _Waited(us, at_least=not observed)
        return best

    def is_hang(waited: _Waited) -> bool:
        return trace.run.status != "running" if waited.us is None else waited.us >= patience_us

    hangs = []
    counts = np.diff(np.append(collectives.first_row, len(joined.order)))
    for i in found.tolist():
        last = int(collectives.last[i])
        rows = joined.order[collectives.first_row[i] : collectives.first_row[i] + counts[i]]
        group = int(collectives.group[i])
        called = {int(messages.rank[row]): messages.ops[messages.op[row]] for row in rows}
        waited = waited_for(rows, last)
        if not is_hang(waited):
            continue
        missing, unknown = members.absent(group, set(called), int(messages.seq[rows[0]]))
        if known.may_have_come(missing, last):
            continue
        in_it = {int(messages.rank[row]) for row in rows if is_open[row]}
        hangs.append(
            Hang(
                op=messages.ops[collectives.op[i]],
                group=messages.groups[group],
                seq=int(collectives.seq[i]),
                entered=tuple(sorted(called)),
                missing=missing,
                unknown=unknown,
                completed=tuple(sorted(set(called) - in_it)),
                since_us=(last - origin_ns) / 1e3,
                waited_us=waited.known_us,
                waited_at_least=waited.at_least,
                timeout_us=members.timeout_us(group),
                called=dict(sorted(called.items())) if len(set(called.values())) > 1 else {},
            )
        )
    pairs = pairs_that_disagree(joined) if trace.run.source == DUMPS else {}
    send_of = {receive: send for send, receive in pairs.items()}
    for row in unmatched.tolist():
        start, rank = int(messages.start[row]), int(messages.rank[row])
        waited, peer = waited_for([row], start), int(messages.peer[row])
        if row in send_of and is_open[send_of[row]]:
            continue  # described with its send
        pair = (send_of[row], row) if row in send_of else (row, pairs.get(row, NULL))
        if is_hang(waited) and not known.may_have_come([peer], start):
            has_trace, came = peer in trace.ranks, pair[1] != NULL
            hangs.append(
                Hang(
                    op=messages.ops[messages.op[row]],
                    group=messages.groups[messages.group[row]],
                    seq=None if messages.seq[row] == NULL else int(messages.seq[row]),
                    entered=tuple(sorted((rank, peer))) if came else (rank,),
                    missing=(peer,) if has_trace and not came else (),
                    unknown=() if has_trace else (peer,),
                    passed=sent_and_expected(joined, *pair) if came else {},
                    since_us=(start - origin_ns) / 1e3,
                    waited_us=waited.known_us,
                    waited_at_least=waited.at_least,
                    timeout_us=members.timeout_us(int(messages.group[row])),
                )
            )
    # A rank that hangs in another message is not the cause, so it comes last.
    stuck = stuck_ranks(hangs)
    hangs.sort(
        key=lambda hang: (
            sum(rank in stuck for rank in hang.missing),
            -len(hang.missing),
            hang.since_us,
        )
    )
    shown = _with_what_was_passed(trace, hangs[:_MAX_SHOWN])
    return tuple(_with_activities(trace, lifetimes, hang, stuck, origin_ns) for hang in shown)


def _patience_ns(trace: Trace, durations: IntArray) -> float:
    """How long a message has to be open to count as one that hangs."""
    if trace.run.status == "running":
        return max(_PATIENCE * int(durations.max(initial=0)), _MIN_WAIT_NS)
    if trace.run.source == DUMPS:
        return 0
    return min(float(np.quantile(durations, _USUAL)) if len(durations) else 0.0, _MIN_WAIT_NS)


class _Waited(NamedTuple):
    """How long a rank waited; `at_least`: if nothing shows that it waited no longer."""

    us: float | None
    at_least: bool

    @property
    def known_us(self) -> float | None:
        """That time; None if nothing was recorded after the wait began."""
        return None if self.at_least and not self.us else self.us


class _Members:
    """The members of groups that are not in a collective."""

    def __init__(self, trace: Trace, joined: Joined) -> None:
        self._trace = trace
        self._messages = messages = joined.messages
        self._with_trace = set(trace.ranks)
        self._lossy = {info.rank for info in trace.run.ranks if info.dropped}
        self._last: dict[tuple[int, int], int] = {}
        rows = np.flatnonzero(messages.is_collective)
        keys, place = np.unique(
            np.stack([messages.group[rows], messages.rank[rows]]), axis=1, return_inverse=True
        )
        last = np.full(keys.shape[1], NULL, dtype=np.int64)
        np.maximum.at(last, place.reshape(-1), messages.seq[rows].astype(np.int64))
        self._last = {
            (group, rank): number
            for group, rank, number in zip(*keys.tolist(), last.tolist(), strict=True)
        }

    def absent(
        self, group: int, entered: set[int], seq: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Members that never entered a collective, and those of which that is not known."""
        members = self._messages.members[group]
        if not members:
            seen = {rank for number, rank in self._last if number == group}
            members = tuple(self._trace.ranks if len(self._messages.groups) == 1 else seen)
        missing, unknown = [], []
        for rank in sorted(set(members) - entered):
            last = self._last.get((group, rank))
            passed_by = seq != NULL and last is not None and last > seq
            lost = last is None and rank in self._lossy
            if passed_by or lost or rank not in self._with_trace:
                unknown.append(rank)
            else:
                missing.append(rank)
        return tuple(missing), tuple(unknown)

    def timeout_us(self, group: int) -> float | None:
        """Timeout of a group."""
        name, members = self._messages.groups[group], self._messages.members[group]
        timeouts = (
            each.timeout_ms
            for info in self._trace.run.ranks
            for each in info.groups
            if each.name == name and each.ranks == members and each.timeout_ms is not None
        )
        timeout = next(timeouts, None)
        return None if timeout is None else timeout * 1e3


def _with_what_was_passed(trace: Trace, hangs: Sequence[Hang]) -> list[Hang]:
    """Adds element types and sizes to collectives whose ranks disagree on them."""
    several = [hang for hang in hangs if len(hang.entered) > 1 and not hang.passed]
    found = {
        rank: passed_by(
            trace.last_windows(rank),
            {(hang.group, hang.seq) for hang in several if rank in hang.entered},
        )
        for rank in sorted({rank for hang in several for rank in hang.entered})
    }
    described = []
    for hang in hangs:
        key = hang.group, hang.seq
        known = {r: found[r][key] for r in hang.entered if r in found and key in found[r]}
        described.append(replace(hang, passed=hang.passed or disagreement(hang.op, known)))
    return described


def has_lasted(hang: Hang) -> bool:
    """Whether ranks hung for longer than the end of one rank would explain."""
    return hang.waited_us is None or hang.waited_us * 1e3 >= _MIN_WAIT_NS


def find_standstill(trace: Trace, scans: Mapping[int, RankScan]) -> Standstill | None:
    """Finds out whether all ranks have stopped recording, in a job whose end was not observed."""
    infos = {info.rank: info for info in trace.run.ranks}
    if not infos or any(info.status == "complete" or not info.silence for info in infos.values()):
        return None
    doing, since = {}, []
    for rank in trace.ranks:
        silence = last_silence(trace, rank)
        if silence is None:
            return None
        doing[rank] = at_place(silence)
        since.append(trace.moment(infos[rank], silence["since_ns"]))
    now = end_of_trace(trace, scans).ns
    return Standstill(doing, None if now is None else max(now - max(since), 0) / 1e3)


def _with_activities(
    trace: Trace, lifetimes: ProcessLifetimes, hang: Hang, stuck: frozenset[int], origin_ns: int
) -> Hang:
    at_ns = origin_ns + round(hang.since_us * 1e3)
    present = set(trace.ranks)
    missing = sorted(hang.missing, key=lambda rank: rank in stuck)
    shown = (*missing[:_MAX_SHOWN], *hang.unknown[:_MAX_SHOWN], *hang.entered[:_MAX_SHOWN])
    activities = {
        rank: last_activity(trace, lifetimes, rank, at_ns).text
        if rank in present
        else "left no trace"
        for rank in shown
    }
    return replace(hang, doing=activities)


@dataclass(frozen=True)
class Mismatch:
    """A completed message on which its ranks disagree; one that did not complete is a hang.

    Attributes:
        op: Its operation; ``send`` for a send and its receive.
        group: Its group.
        seq: Its number in the group; None for a send.
        called: The operation of each rank if these differ, else empty.
        passed: Element type and shapes or bytes of each rank if these differ, else empty.
    """

    op: str
    group: str
    seq: int | None
    called: dict[int, str] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)


def find_mismatches(trace: Trace, joined: Joined, hangs: Sequence[Hang]) -> tuple[Mismatch, ...]:
    """Finds completed messages on which ranks disagree, in the order of time, the first 20.

    Element types, and sizes that may differ from rank to rank in a joined collective, are compared
    in dumps of the Flight Recorder only, which are small.
    """
    messages, collectives = joined.messages, joined.collectives
    is_dump = trace.run.source == DUMPS
    chosen = collectives.seq != NULL
    chosen &= collectives.ranks > 1 if is_dump else collectives.state == State.MISMATCH
    hung = {(hang.group, hang.seq) for hang in hangs}
    counts = np.diff(np.append(collectives.first_row, len(joined.order)))
    called: dict[tuple[str, int | None], dict[int, str]] = {}
    for place in np.flatnonzero(chosen).tolist():
        key: tuple[str, int | None]
        key = messages.groups[collectives.group[place]], int(collectives.seq[place])
        if key not in hung:
            first = collectives.first_row[place]
            rows = joined.order[first : first + counts[place]]
            called[key] = {int(messages.rank[row]): messages.ops[messages.op[row]] for row in rows}
    passed: dict[tuple[str, int | None], dict[int, Passed]] = {key: {} for key in called}
    for rank in sorted({rank for each in called.values() for rank in each}):
        wanted = {key for key, each in called.items() if rank in each}
        for its, one in passed_by(trace.windows(rank), wanted).items():
            passed[its][rank] = one
    found = []
    for key, ops in called.items():
        op = ops[min(ops)]
        several = len(set(ops.values())) > 1
        differs = {} if several else disagreement(op, passed[key])
        if several or differs:
            described = dict(sorted(ops.items())) if several else {}
            found.append(Mismatch(op, *key, called=described, passed=differs))
    if is_dump:
        found += [
            Mismatch(
                "send",
                messages.groups[messages.group[send]],
                None,
                passed=sent_and_expected(joined, send, receive),
            )
            for send, receive in pairs_that_disagree(joined).items()
            if not messages.unfinished[[send, receive]].any()
        ]
    return tuple(found[:_MAX_SHOWN])
