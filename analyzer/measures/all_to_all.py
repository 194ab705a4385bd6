"""How evenly all-to-alls load the ranks, as those that bring tokens to experts.

The load of a rank is the bytes that it receives. Of a collective whose busiest rank receives more
than the mean, the transfer would be shorter with even loads; the estimate takes the transfer to
grow with the bytes of the busiest rank. Compute that is uneven because of it shows as waiting at
the next collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL
from ddltrace.analyzer.joined.join import State
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Table, merged_by
from ddltrace.analyzer.measures.steps import in_steps


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
    """

    received: dict[int, float]
    count: int
    largest: float
    wait_ns: float
    timed: int
    transfer_ns: float
    lost_ns: float

    def row(self, group: str) -> AllToAllRow:
        """The means."""
        ranks = tuple(sorted(self.received))
        bytes_of = np.array([self.received[rank] for rank in ranks])
        mean = float(bytes_of.mean())
        timed = max(self.timed, 1) * 1e3
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
        )


def _found(steps: JoinedSteps) -> dict[str, _Sums]:
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
    found = {}
    for group in np.unique(collectives.group[usable]).tolist():
        mine = usable & (collectives.group == group)
        kept = mine[place]
        ranks, which = np.unique(messages.rank[rows[kept]], return_inverse=True)
        by_rank = np.bincount(which, weights=received[kept]).tolist()
        found[messages.groups[group]] = _Sums(
            received=dict(zip(ranks.tolist(), by_rank, strict=True)),
            count=int(mine.sum()),
            largest=float(largest[mine].sum()),
            wait_ns=float(collectives.wait[mine].sum()),
            timed=int((mine & collectives.timed).sum()),
            transfer_ns=float(transfer[mine].sum()),
            lost_ns=float(lost[mine].sum()),
        )
    return found


def _both(former: dict[str, _Sums], later: dict[str, _Sums]) -> dict[str, _Sums]:
    merged = dict(former)
    for group, sums in later.items():
        one = merged.get(group)
        if one is None:
            merged[group] = sums
            continue
        ranks = one.received.keys() | sums.received.keys()
        merged[group] = _Sums(
            {rank: one.received.get(rank, 0.0) + sums.received.get(rank, 0.0) for rank in ranks},
            one.count + sums.count,
            one.largest + sums.largest,
            one.wait_ns + sums.wait_ns,
            one.timed + sums.timed,
            one.transfer_ns + sums.transfer_ns,
            one.lost_ns + sums.lost_ns,
        )
    return merged


def _rows(found: dict[str, _Sums]) -> tuple[AllToAllRow, ...]:
    rows = [sums.row(group) for group, sums in found.items()]
    return tuple(sorted(rows, key=lambda row: -(row.lost_us or 0.0) * row.count))


ALL_TO_ALL: Final[Measure[dict[str, _Sums], tuple[AllToAllRow, ...]]] = Measure(
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
            "waiting": "wait_us",
            "transfer": "transfer_us",
            "uneven": "lost_us",
        },
    ),
)
