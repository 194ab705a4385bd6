"""The steps of a run over all ranks, and which of them are steady.

The rule: the first completed step is warm-up (first allocations, and PyTorch rebuilds its
buckets after it). After it, up to a quarter of the steps, so is every step up to the last
one whose messages differ in number or bytes from those of the later half (their median), or
that lasted longer than 1.5 times the later half's median. In a short run, steps in a row from
the first on that are that long are warm-up up to half of all steps. A run of one step is
summarized over that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, ColumnTable, IntArray, place_in
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.trace.step_selection import RULE_ASKED

_SLOW: Final = 1.5
_WARMUP_PART: Final = 4
_MAX_LATER: Final = 20
MAX_WARMUP: Final = 1 + _MAX_LATER
"""There are at most this many warm-up steps."""


RULE: Final = (
    "warm-up: the first step, then those with other messages than the later half "
    "or over 1.5 times its median"
)
RULE_ONE: Final = "the only step"
RULE_NONE: Final = "no completed steps: the whole traced window"


@dataclass(frozen=True)
class Steps(ColumnTable):
    """Completed steps over all ranks, ascending.

    Attributes:
        number: Their numbers.
        start: Earliest start on any rank, ns.
        end: Latest end on any rank, ns.
        last_rank: The rank with the latest end.
        lead: Difference to the second latest end; 0 with a single rank.
        ranks: Number of ranks that completed each.
        steady: Whether the summary counts it.
        rule: How steady steps were determined.
    """

    number: IntArray
    start: IntArray
    end: IntArray
    last_rank: IntArray
    lead: IntArray
    ranks: IntArray
    steady: IntArray
    rule: str


def find_steps(scans: Mapping[int, RankScan], joined: Joined, wanted: range | None = None) -> Steps:
    """Collects the completed steps of all ranks.

    Args:
        joined: All messages.
        wanted: Only these; they all count as steady.
    """
    step = _concatenate([scan.step for scan in scans.values()])
    start = _concatenate([scan.step_start for scan in scans.values()])
    end = _concatenate([scan.step_end for scan in scans.values()])
    rank = np.repeat(list(scans), [len(scan.step) for scan in scans.values()]).astype(np.int64)
    if wanted is not None:
        kept = (step >= wanted.start) & (step < wanted.stop)
        step, start, end, rank = step[kept], start[kept], end[kept], rank[kept]
    order = np.lexsort((end, step))
    step, start, end, rank = step[order], start[order], end[order], rank[order]
    number, first, counts = np.unique(step, return_index=True, return_counts=True)
    if not len(number):
        none = np.empty(0, dtype=np.int64)
        return Steps(none, none, none, none, none, none, none.astype(bool), RULE_NONE)
    lasts = first + counts - 1
    begins = np.minimum.reduceat(start, first)
    if wanted is not None:
        steady, rule = np.ones(len(number), dtype=bool), RULE_ASKED
    elif len(number) == 1:
        steady, rule = np.ones(1, dtype=bool), RULE_ONE
    else:
        warm = count_warmup(end[lasts] - begins, *messages_in_steps(number, joined))
        steady, rule = np.arange(len(number)) >= warm, RULE
    lead = end[lasts] - end[np.where(counts > 1, lasts - 1, lasts)]
    return Steps(number, begins, end[lasts], rank[lasts], lead, counts, steady, rule)


def count_warmup(wall: IntArray, count: IntArray, size: IntArray) -> int:
    """Returns how many of the first steps are warm-up, by the rule above.

    Args:
        wall: Wall time of each step; there are at least two steps.
        count: Messages of all ranks in each.
        size: Their bytes.
    """
    later = slice(len(wall) // 2, None)
    unlike = wall > _SLOW * np.median(wall[later])
    in_a_row = int(np.argmin(np.append(unlike[1 : len(wall) // 2], False)))
    for values in (count, size):
        unlike |= values != np.median(values[later])
    limit = min(max(1, len(wall) // _WARMUP_PART), _MAX_LATER)
    warm = 1 + int(np.flatnonzero(unlike[1:limit]).max(initial=-1)) + 1 if limit > 1 else 1
    return max(warm, 1 + min(in_a_row, _MAX_LATER))


def messages_in_steps(number: IntArray, joined: Joined) -> tuple[IntArray, IntArray]:
    """Messages and bytes of all ranks in each step."""
    messages = joined.messages
    place = np.searchsorted(number, messages.step)
    inside = (place < len(number)) & (messages.step != NULL)
    inside[inside] = number[place[inside]] == messages.step[inside]
    place, size = place[inside], np.maximum(messages.bytes[inside], 0)
    count = np.bincount(place, minlength=len(number))
    total = np.bincount(place, weights=size, minlength=len(number))
    return count, total


def _concatenate(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def in_steps(step: IntArray, numbers: IntArray) -> IntArray:
    """Whether each step number is among the given, ascending steps."""
    return np.asarray(place_in(step, numbers) != NULL)
