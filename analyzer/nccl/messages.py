"""When NCCL's messages ran, from the events below them.

`coll` and `p2p` events end when NCCL has handed the message over. It is complete when the last of
its kernel channels has stopped; without those, when its last proxy operation has.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, place_in

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MESSAGES: Final = ("coll", "p2p", "ce_coll")
KERNEL, PROXY, HANDED_OVER = 0, 1, 2
"""What tells when a message ran: its kernel channels, its proxies, or only that it was enqueued."""


class RunTimes(NamedTuple):
    """When messages ran.

    Attributes:
        rows: Their rows in the table of events.
        begin: When they began.
        end: When they were complete; `NULL_NS` if something of them has not ended.
        source: `KERNEL`, `PROXY` or `HANDED_OVER`.
    """

    rows: Ints
    begin: Ints
    end: Ints
    source: Ints


def numbers(table: pa.Table, name: str, null: int = NULL_NS) -> Ints:
    """A column of integers, with a value in place of nulls."""
    column = table[name].combine_chunks()
    return np.asarray(column.cast(pa.int64()).fill_null(null).to_numpy(zero_copy_only=False))


def is_kind(table: pa.Table, *kinds: str) -> Bools:
    """Which events are of some kinds."""
    column = table["kind"].combine_chunks()
    wanted = pc.is_in(column, value_set=pa.array(kinds, pa.string()))
    return np.asarray(wanted.to_numpy(zero_copy_only=False))


def rows_of_parents(table: pa.Table, rows: Ints) -> Ints:
    """The row of each event's parent in the table of one process; `NULL` if it is not there.

    Parents in other processes (`parent_pid`) are not in it.
    """
    number = numbers(table, "event")
    parent = numbers(table, "parent")[rows]
    own = numbers(table, "parent_pid")[rows] == NULL_NS
    return np.where(own, place_in(parent, number), NULL)


def parents_in_job(table: pa.Table) -> Ints:
    """The row of each event's parent, in a table of several processes, one after the other."""
    process = np.stack([numbers(table, "rank"), numbers(table, "pid")])
    edges = np.flatnonzero(np.any(np.diff(process, axis=1) != 0, axis=0)) + 1
    parents = np.empty(len(table), np.int64)
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(table)], strict=True):
        part = table.slice(first, last - first)
        found = rows_of_parents(part, np.arange(last - first))
        parents[first:last] = np.where(found >= 0, found + first, found)
    return parents


def run_times(table: pa.Table) -> RunTimes:
    """When the messages of one process ran.

    Args:
        table: Its events, in the order of their numbers.
    """
    rows = np.flatnonzero(is_kind(table, *MESSAGES))
    start, stop = numbers(table, "start_ns"), numbers(table, "end_ns")
    begin, end = start.copy(), stop.copy()
    source = np.full(len(table), HANDED_OVER)
    for kind, name in ((PROXY, "proxy_op"), (KERNEL, "kernel_ch")):  # the second one prevails
        children = np.flatnonzero(is_kind(table, name))
        parents = rows_of_parents(table, children)
        children, parents = children[parents >= 0], parents[parents >= 0]
        first = np.full(len(table), np.iinfo(np.int64).max)
        last = np.full(len(table), NULL_NS)
        np.minimum.at(first, parents, start[children])
        np.maximum.at(last, parents, stop[children])
        last[parents[stop[children] == NULL_NS]] = NULL_NS
        has = np.zeros(len(table), np.bool_)
        has[parents] = True
        begin, end = np.where(has, first, begin), np.where(has, last, end)
        source[has] = kind
    return RunTimes(rows, begin[rows], end[rows], source[rows])
