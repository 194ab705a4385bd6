"""Every collective of a trace as one row, and the filter that the address describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddltrace.analyzer.query.result_tables import collectives_table

if TYPE_CHECKING:
    from ddltrace.analyzer.joined.analyzed import Analyzed
    from ddltrace.dashboard.address import Address


@dataclass(frozen=True)
class Collective:
    """One collective on all its ranks.

    Attributes:
        op, group, step, ranks: Operation, group, step, number of ranks seen.
        title: Operation and number in its group.
        bytes: Input of one rank; None if not known.
        first_ns, end_ns: First arrival and last end, from the trace's first event.
        last_rank: The rank that arrived last.
        lateness_us: Its arrival after the median arrival.
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
    first_ns: int
    end_ns: int
    last_rank: int
    lateness_us: float
    skew_us: float
    wait_us: float | None
    transfer_us: float | None


def collectives(analyzed: Analyzed, origin_ns: int) -> list[Collective]:
    """All collectives by first arrival."""
    rows = collectives_table(analyzed).sort_by("first_ns").to_pylist()
    return [
        Collective(
            op=row["op"] or "?",
            group=row["group"] or "",
            title=f"{row['op']} #{row['seq']}" if row["seq"] is not None else str(row["op"]),
            step=row["step"],
            bytes=row["bytes"],
            ranks=row["ranks"],
            first_ns=row["first_ns"] - origin_ns,
            end_ns=(row["last_ns"] if row["end_ns"] is None else row["end_ns"]) - origin_ns,
            last_rank=row["last_rank"],
            lateness_us=row["lateness_us"],
            skew_us=row["arrival_skew_us"],
            wait_us=row["wait_us"],
            transfer_us=row["transfer_us"],
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Filter:
    """Which collectives the table shows; None admits all.

    Attributes:
        op: Operation.
        group: Process group.
        rank: The rank that arrived last, as text.
    """

    op: str | None = None
    group: str | None = None
    rank: str | None = None

    @classmethod
    def of(cls, address: Address) -> Filter:
        """Reads the keys ``op``, ``group`` and ``rank`` of an address."""
        return cls(*(address.values.get(key) for key in ("op", "group", "rank")))

    def admits(self, row: Collective) -> bool:
        """Whether a collective is shown."""
        return (
            self.op in (None, row.op)
            and self.group in (None, row.group)
            and self.rank in (None, str(row.last_rank))
        )
