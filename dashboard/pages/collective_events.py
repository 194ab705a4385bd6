"""The collectives of a trace as rows, and the filter that the address describes.

A trace may have a hundred thousand collectives: they are filtered and sorted as columns, and only
those that are shown become rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS
from ddltrace.analyzer.joined.join import State

if TYPE_CHECKING:
    from ddltrace.analyzer.events.event_columns import BoolArray, IntArray
    from ddltrace.analyzer.joined.join import Joined
    from ddltrace.analyzer.model import Analyzed
    from ddltrace.dashboard.address import Address


@dataclass(frozen=True)
class Collective:
    """One collective on all its ranks.

    Attributes:
        op, group, ranks: Operation, group, number of ranks seen.
        title: Operation and number in its group.
        step: The step; None if it is in none.
        bytes: Input of one rank; None if not known.
        state: ``complete``, ``open``, ``partial`` or ``mismatch``, see `State`.
        first_ns, end_ns: First arrival and last end, from the trace's first event.
        last_rank: The rank that arrived last; None if not all members were seen, since a missing
            one may have arrived later. So are `lateness_us` and `skew_us`.
        lateness_us: Its arrival minus the median arrival of the other ranks.
        skew_us: Last arrival minus first.
        wait_us: Summed over ranks; None if the collective is not complete.
        transfer_us: Last end minus last arrival; None if it is not complete.
    """

    op: str
    group: str
    title: str
    step: int | None
    bytes: int | None
    ranks: int
    state: str
    first_ns: int
    end_ns: int
    last_rank: int | None
    lateness_us: float | None
    skew_us: float | None
    wait_us: float | None
    transfer_us: float | None


@dataclass(frozen=True)
class Filter:
    """Which collectives the table shows; None admits all.

    Attributes:
        op: Operation.
        group: Process group.
        rank: The rank that arrived last, as text.
        state: The state.
    """

    op: str | None = None
    group: str | None = None
    rank: str | None = None
    state: str | None = None

    @classmethod
    def of(cls, address: Address) -> Filter:
        """Reads the keys ``op``, ``group``, ``rank`` and ``state`` of an address."""
        return cls(*(address.values.get(key) for key in ("op", "group", "rank", "state")))


@dataclass(frozen=True)
class Selection:
    """Some collectives of a trace.

    Attributes:
        rows: The first of those that the filter admits.
        admitted: How many it admits.
        total: How many the trace has.
        choices: Key of the filter -> the values that occur.
    """

    rows: list[Collective]
    admitted: int
    total: int
    choices: dict[str, list[str]]


def select(
    analyzed: Analyzed, origin_ns: int, wanted: Filter, *, sort: str = "", limit: int
) -> Selection:
    """The first collectives that a filter admits.

    Args:
        analyzed: The analysis of the trace.
        origin_ns: The trace's first event.
        sort: ``op``, ``group``, ``step``, ``size``, ``ranks``, ``skew``, ``last``, ``late``,
            ``wait`` or ``transfer``: texts alphabetically, numbers largest first, unknown ones
            last. By first arrival for any other text.
        limit: Largest number of rows.
    """
    joined = analyzed.joined
    one = joined.collectives
    complete, seen = one.timed, np.isin(one.state, (State.COMPLETE, State.OPEN))
    ops, groups = joined.messages.ops, joined.messages.groups
    states = [state.name.lower() for state in State]
    last_rank = np.where(seen, one.last_rank, NULL)
    admitted = np.ones(len(one), dtype=bool)
    for code, names, name in (
        (one.op, ops, wanted.op),
        (one.group, groups, wanted.group),
        (one.state, states, wanted.state),
    ):
        if name is not None:
            admitted &= np.isin(code, [number for number, own in enumerate(names) if own == name])
    last_ranks = np.unique(last_rank[seen]).tolist()
    if wanted.rank is not None:
        admitted &= np.isin(last_rank, [rank for rank in last_ranks if str(rank) == wanted.rank])
    columns = {
        "step": (one.step, one.step != NULL),
        "size": (one.bytes, one.bytes != NULL),
        "ranks": (one.ranks, np.ones(len(one), dtype=bool)),
        "skew": (one.last - one.first, seen),
        "last": (one.last_rank, seen),
        "late": (one.last - one.others, seen),
        "wait": (one.wait, complete),
        "transfer": (np.maximum(one.end - one.last, 0), complete),
    }
    rows = np.flatnonzero(admitted)
    rows = rows[np.argsort(one.first[rows], kind="stable")]
    if sort == "op":
        rows = rows[np.lexsort((one.seq[rows], _alphabetical(ops)[one.op[rows]]))]
    elif sort == "group":
        rows = rows[np.argsort(_alphabetical(groups)[one.group[rows]], kind="stable")]
    elif sort in columns:
        rows = _largest_first(rows, *columns[sort])
    return Selection(
        rows=[_row(joined, int(row), origin_ns) for row in rows[:limit]],
        admitted=len(rows),
        total=len(one),
        choices={
            "op": sorted({ops[code] for code in np.unique(one.op)}),
            "group": sorted({groups[code] for code in np.unique(one.group)}),
            "rank": list(map(str, last_ranks)),
            "state": sorted({states[code] for code in np.unique(one.state)}),
        },
    )


def _alphabetical(names: list[str]) -> IntArray:
    """The place of each name among all of them in alphabetical order."""
    place = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.array([place[name] for name in names], dtype=np.int64)


def _largest_first(rows: IntArray, values: IntArray, known: BoolArray) -> IntArray:
    order = np.argsort(-values[rows], kind="stable")
    ordered = rows[order]
    return np.concatenate([ordered[known[ordered]], rows[~known[rows]]])


def _row(joined: Joined, row: int, origin_ns: int) -> Collective:
    one = joined.collectives
    op = joined.messages.ops[one.op[row]]
    first, last, others, end = (
        int(column[row]) for column in (one.first, one.last, one.others, one.end)
    )
    state = State(int(one.state[row]))
    seen = state in (State.COMPLETE, State.OPEN)
    complete = bool(one.timed[row])
    return Collective(
        op=op,
        group=joined.messages.groups[one.group[row]],
        title=f"{op} #{int(one.seq[row])}",
        step=_known(one.step[row]),
        bytes=_known(one.bytes[row]),
        ranks=int(one.ranks[row]),
        state=state.name.lower(),
        first_ns=first - origin_ns,
        end_ns=(last if end == NULL_NS else end) - origin_ns,
        last_rank=int(one.last_rank[row]) if seen else None,
        lateness_us=(last - others) / 1e3 if seen else None,
        skew_us=(last - first) / 1e3 if seen else None,
        wait_us=int(one.wait[row]) / 1e3 if complete else None,
        transfer_us=max(end - last, 0) / 1e3 if complete else None,
    )


def _known(value: IntArray) -> int | None:
    return None if value == NULL else int(value)
