"""How evenly all-to-alls load the ranks, as those that bring tokens to experts.

The load of a rank is the bytes that it receives. Of a collective whose busiest rank receives more
than the mean, the transfer would be shorter with even loads; the estimate takes the transfer to
grow with the bytes of the busiest rank. Compute that is uneven because of it shows as waiting at
the next collective.

What goes from each rank to each other is known of all-to-alls whose calls gave these sizes. Which
expert a token goes to is not known from messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, BoolArray, FloatArray, distinct
from ddltrace.analyzer.formatting.units import NOT_KNOWN, bytes_text
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Table, merged_by
from ddltrace.analyzer.measures.steps import in_steps

MAX_PAIRWISE: Final = 64
"""A row per pair of more ranks would fill a table with the square of their number."""


@dataclass(frozen=True)
class AllToAllRow:
    """The all-to-alls of one group in the steady steps, of all steps without any.

    Attributes:
        group: Name of the group.
        ranks: Its ranks, in order.
        count: All-to-alls of which the received bytes of all ranks are known.
        bytes: Bytes that a rank receives in one of them, the mean.
        imbalance: The bytes of the busiest rank of each, over the mean of its ranks: 1 if all loads
            are equal; the mean over all, weighted by their bytes.
        busiest_rank: The rank that receives most in all.
        loads: What each of `ranks` receives in all, over the mean of the ranks.
        wait_us: Mean wait of a rank for the last one to arrive.
        transfer_us: Mean transfer of one, from the last arrival to the last end; null if no end is
            known.
        lost_us: Estimated part of it that even loads would save.
        sized: All-to-alls of which the bytes from each rank to each other are known.
        sent: Of these, the mean bytes from each of `ranks` (one list each) to each of `ranks`; null
            without any, and for more than 64 ranks.
        busiest_pair: The sender and the receiver, two ranks, of most bytes in these; null without
            any.
        pair_bytes: The mean bytes of this pair.
    """

    group: str
    ranks: tuple[int, ...]
    count: int
    bytes: float
    imbalance: float
    busiest_rank: int
    loads: tuple[float, ...]
    wait_us: float
    transfer_us: float | None
    lost_us: float | None
    sized: int
    sent: tuple[tuple[float, ...], ...] | None
    busiest_pair: tuple[int, int] | None
    pair_bytes: float | None


class Sent(NamedTuple):
    """What the ranks of a group sent each other in all-to-alls.

    Attributes:
        group: Index into the groups of the messages.
        ranks: The members, ascending.
        collectives: Of which collectives that is known.
        bytes: Bytes from each member (row) to each member (column), summed.
    """

    group: int
    ranks: tuple[int, ...]
    collectives: BoolArray
    bytes: FloatArray


def sent_between(joined: Joined, chosen: BoolArray) -> Iterator[Sent]:
    """What ranks sent each other in all-to-alls whose calls gave the sizes on all ranks.

    Args:
        joined: All messages.
        chosen: Which collectives count.
    """
    messages, collectives = joined.messages, joined.collectives
    of_message = np.asarray(joined.collective)
    size = messages.group_size[messages.group]
    rows = np.flatnonzero((messages.split_count > 0) & (messages.split_count == size))
    rows = rows[of_message[rows] != NULL]
    known = np.bincount(of_message[rows], minlength=len(collectives))
    known_of = chosen & (collectives.state == State.COMPLETE) & (known == collectives.ranks)
    rows = rows[known_of[of_message[rows]]]
    first = np.cumsum(messages.split_count) - messages.split_count
    for group in distinct(messages.group[rows]).tolist():
        mine = rows[messages.group[rows] == group]
        ranks = tuple(distinct(messages.rank[mine]).tolist())
        columns = np.argsort(messages.members[group] or ranks)
        if len(columns) != len(ranks):
            continue
        sizes = messages.split_bytes[first[mine][:, None] + columns]
        if sizes.min() < 0:
            continue
        found = np.zeros((len(ranks), len(ranks)))
        np.add.at(found, np.searchsorted(ranks, messages.rank[mine]), sizes)
        yield Sent(group, ranks, known_of & (collectives.group == group), found)


_Key: TypeAlias = tuple[str, tuple[int, ...]]
"""Name and ranks of a group: those of several groups may have one name."""


@dataclass(frozen=True)
class _Sums:
    """Sums over the all-to-alls of one group.

    Attributes:
        received: Bytes by rank.
        count: How many there are.
        largest: Bytes of the busiest rank of each.
        wait_ns: Waits of all ranks.
        timed: How many have a known end.
        transfer_ns: Their transfers.
        lost_ns: The part of these that even loads would save.
        sized: How many gave the bytes from each rank to each other.
        sent: These bytes, by ranks; None without any.
    """

    received: dict[int, float]
    count: int
    largest: float
    wait_ns: float
    timed: int
    transfer_ns: float
    lost_ns: float
    sized: int
    sent: FloatArray | None

    def row(self, group: str, ranks: tuple[int, ...]) -> AllToAllRow:
        """The means."""
        bytes_of = np.array([self.received[rank] for rank in ranks])
        mean = float(bytes_of.mean())
        timed = max(self.timed, 1) * 1e3
        sent = self.sent if self.sent is None else self.sent / self.sized
        pair: tuple[int, int] | None = None
        if sent is not None:
            others = np.where(np.eye(len(ranks), dtype=bool), -1, sent)
            src, dst = divmod(int(others.argmax()), len(ranks))
            pair = ranks[src], ranks[dst]
        return AllToAllRow(
            group=group,
            ranks=ranks,
            count=self.count,
            bytes=mean / self.count,
            imbalance=self.largest / mean,
            busiest_rank=ranks[int(bytes_of.argmax())],
            loads=tuple((bytes_of / mean).tolist()),
            wait_us=self.wait_ns / self.count / len(ranks) / 1e3,
            transfer_us=self.transfer_ns / timed if self.timed else None,
            lost_us=self.lost_ns / timed if self.timed else None,
            sized=self.sized,
            sent=None
            if sent is None or len(ranks) > MAX_PAIRWISE
            else tuple(map(tuple, sent.tolist())),
            busiest_pair=pair,
            pair_bytes=None if pair is None else float(others.max()),
        )


def _found(steps: JoinedSteps) -> dict[_Key, _Sums]:
    joined = steps.joined
    messages, collectives = joined.messages, joined.collectives
    of_message = np.asarray(joined.collective)
    rows = np.flatnonzero(
        messages.op_is("all_to_all") & (of_message != NULL) & (messages.out_bytes >= 0)
    )
    if not len(rows):
        return {}
    size = len(collectives)
    place, received = of_message[rows], messages.out_bytes[rows].astype(np.float64)
    known = np.bincount(place, minlength=size)
    total = np.asarray(np.bincount(place, weights=received, minlength=size), np.float64)
    largest = np.zeros(size)
    np.maximum.at(largest, place, received)
    usable = steps.chosen_collectives & (collectives.state == State.COMPLETE) & (total > 0)
    usable &= (known == collectives.ranks) & (known > 1)
    if len(steps.steady):
        usable &= in_steps(collectives.step, steps.steady)
    transfer = np.where(collectives.timed, collectives.end - collectives.last, 0)
    lost = transfer * (1 - total / np.maximum(known, 1) / np.maximum(largest, 1))
    sent = {one.group: one for one in sent_between(joined, usable)}
    found = {}
    for group in distinct(collectives.group[usable]).tolist():
        mine = usable & (collectives.group == group)
        kept = mine[place]
        ranks, which = np.unique(messages.rank[rows[kept]], return_inverse=True)
        by_rank = np.bincount(which, weights=received[kept]).tolist()
        between = sent.get(group)
        found[messages.groups[group], tuple(ranks.tolist())] = _Sums(
            received=dict(zip(ranks.tolist(), by_rank, strict=True)),
            count=int(mine.sum()),
            largest=float(largest[mine].sum()),
            wait_ns=float(collectives.wait[mine].sum()),
            timed=int((mine & collectives.timed).sum()),
            transfer_ns=float(transfer[mine].sum()),
            lost_ns=float(lost[mine].sum()),
            sized=0 if between is None else int(between.collectives.sum()),
            sent=None if between is None else between.bytes,
        )
    return found


def _both(former: dict[_Key, _Sums], later: dict[_Key, _Sums]) -> dict[_Key, _Sums]:
    merged = dict(former)
    for group, sums in later.items():
        one = merged.get(group)
        if one is None:
            merged[group] = sums
            continue
        sent = [each.sent for each in (one, sums) if each.sent is not None]
        merged[group] = _Sums(
            {rank: one.received[rank] + sums.received[rank] for rank in one.received},
            one.count + sums.count,
            one.largest + sums.largest,
            one.wait_ns + sums.wait_ns,
            one.timed + sums.timed,
            one.transfer_ns + sums.transfer_ns,
            one.lost_ns + sums.lost_ns,
            one.sized + sums.sized,
            np.sum(sent, axis=0) if sent else None,
        )
    return merged


def _rows(found: dict[_Key, _Sums]) -> tuple[AllToAllRow, ...]:
    rows = [sums.row(*key) for key, sums in found.items()]
    return tuple(sorted(rows, key=lambda row: -(row.lost_us or 0.0) * row.count))


def _pair_text(row: AllToAllRow) -> str:
    if row.busiest_pair is None:
        return NOT_KNOWN
    src, dst = row.busiest_pair
    return f"{src} to {dst} ({bytes_text(row.pair_bytes)})"


ALL_TO_ALL: Final[Measure[dict[_Key, _Sums], tuple[AllToAllRow, ...]]] = Measure(
    "all_to_all",
    lambda whole: _rows(whole.found.of(ALL_TO_ALL)),
    _found,
    merged_by(_both),
    of="steady",
    rows=AllToAllRow,
    table=Table[AllToAllRow](
        "Load in all-to-alls, means of one (uneven: transfer that even loads would save, estimate)",
        {
            "group": "group",
            "ranks": lambda row: str(len(row.ranks)),
            "count": "count",
            "received": "bytes",
            "imbalance": lambda row: f"{row.imbalance:.2f}",
            "busiest": lambda row: f"{row.busiest_rank} ({max(row.loads):.2f}x)",
            "busiest pair": _pair_text,
            "waiting": "wait_us",
            "transfer": "transfer_us",
            "uneven": "lost_us",
        },
    ),
)
