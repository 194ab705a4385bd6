"""Splits each rank's steps into disjoint parts that sum to the step, from the analyzer's
measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.measures.breakdown import FIELDS

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analyzed

PARTS: Final = ("compute", "update", "overlap", "exposed", "copies", "data", "idle")
"""Parts of a rank's step, in the order of drawing."""


@dataclass(frozen=True)
class Breakdown:
    """Mean per step of one rank's time, in microseconds.

    Attributes:
        rank: The rank.
        steps: Number of steps that the mean is over; 0: the whole trace, which has no steps.
        parts_us: `PARTS` -> time. ``compute`` is compute without communication, less the
            optimizer's ``update``; ``overlap`` is compute and communication at once; ``exposed``
            is communication alone; ``copies``, then ``data``, are the time outside of the previous
            parts; ``idle`` is the rest. They sum to the mean duration of a step.
        messages: Mean number of messages that start in a step.
        message_bytes: Mean per step of their input bytes; a receive has none.
    """

    rank: int
    steps: int
    parts_us: dict[str, float]
    messages: float
    message_bytes: float


def rank_breakdowns(analyzed: Analyzed) -> list[Breakdown]:
    """The breakdown of each rank's steady steps, or of the whole trace if it has no steps.

    Args:
        analyzed: The analysis; ranks without recorded compute are left out.
    """
    columns = analyzed.analysis.rank_steps
    steady = [row.step for row in analyzed.analysis.steps if row.steady]
    messages = analyzed.joined.messages
    breakdowns = []
    for row in analyzed.analysis.ranks:
        chosen = columns["rank"] == row.rank
        sent = messages.rank == row.rank
        if steady:
            chosen &= np.isin(columns["step"], steady)
            sent &= np.isin(messages.step, columns["step"][chosen])
        total = {name: float(columns[name][chosen].sum()) for name in FIELDS}
        if not chosen.any() or np.isnan(total["compute_ns"]):
            continue
        count = int(chosen.sum())
        breakdowns.append(
            Breakdown(
                rank=row.rank,
                steps=count if steady else 0,
                parts_us={name: ns / 1e3 / count for name, ns in _parts(total).items()},
                messages=int(sent.sum()) / count,
                message_bytes=int(np.maximum(messages.bytes[sent], 0).sum()) / count,
            )
        )
    return breakdowns


def _parts(total: dict[str, float]) -> dict[str, float]:
    """`PARTS` of sums of `FIELDS`."""
    return {
        "compute": total["compute_ns"] - total["overlap_ns"] - total["update_alone_ns"],
        "update": total["update_alone_ns"],
        "overlap": total["overlap_ns"],
        "exposed": total["exposed_ns"],
        "copies": total["copy_ns"],
        "data": total["idle_data_ns"],
        "idle": total["idle_ns"] - total["idle_data_ns"],
    }
