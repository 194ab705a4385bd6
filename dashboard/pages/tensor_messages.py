"""The messages that carried one tensor in one step, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow.compute as pc

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analysis
    from ddltrace.dashboard.workspace import OpenTrace


@dataclass(frozen=True)
class TensorMessage:
    """One message on one rank.

    Attributes:
        title: Operation and number in its group.
        rank: Global rank.
        enqueue_us, start_us: From the start of the step on this rank; None if not seen.
        length_us: From start to end; None if the end was not seen.
        start_ns, end_ns: From the trace's first event; an end that was not seen is the start.
        bytes: Input bytes; None if not known.
        others: Names of the other tensors that it carries.
    """

    title: str
    rank: int
    enqueue_us: float | None
    start_us: float
    length_us: float | None
    start_ns: int
    end_ns: int
    bytes: int | None
    others: tuple[str, ...]


def usual_step(analysis: Analysis) -> int | None:
    """The steady step whose wall time is the median; None without steady steps."""
    steady = sorted((row for row in analysis.steps if row.steady), key=lambda row: row.wall_us)
    return steady[len(steady) // 2].step if steady else None


def messages_of(opened: OpenTrace, tensor: str, step: int) -> list[TensorMessage]:
    """The messages of a step that carried a tensor, by start.

    Args:
        tensor: The parameter's name.

    Returns:
        One entry per message and rank.
    """
    found = []
    origin = opened.trace.origin_ns
    for rank in opened.trace.ranks:
        names = opened.trace.tensor_names(rank)
        wanted = {number for number, name in names.items() if name == tensor}
        span = opened.timeline.step_span(rank, step)
        begin = None if span is None else span[0] + origin
        messages = opened.timeline.indexes[rank].messages
        for row in messages.filter(pc.equal(messages["step"], step)).to_pylist():
            carried = set(row["tensors"] or ())
            if not carried & wanted:
                continue
            start, end = row["start_ns"], row["end_ns"]
            base = start if begin is None else begin
            number = "" if row["seq"] is None else f" #{row['seq']}"
            found.append(
                TensorMessage(
                    title=f"{row['op']}{number}",
                    rank=rank,
                    enqueue_us=None
                    if row["enqueue_ns"] is None
                    else (row["enqueue_ns"] - base) / 1e3,
                    start_us=(start - base) / 1e3,
                    length_us=None if end is None else (end - start) / 1e3,
                    start_ns=start - origin,
                    end_ns=(start if end is None else end) - origin,
                    bytes=row["bytes"],
                    others=tuple(names[n] for n in carried - wanted if n in names),
                )
            )
    return sorted(found, key=lambda message: (message.start_ns, message.rank))
