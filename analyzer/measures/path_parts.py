"""What holds the most of the critical paths of the steady steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ddltrace.analyzer.columns import NULL, NULL_NS, IntArray
from ddltrace.analyzer.critical_path import Path
from ddltrace.analyzer.join import Joined
from ddltrace.analyzer.model import CATEGORIES, PathPart, PathTotals

_SHOWN: Final = 100
_UNBOUNDED: Final = np.iinfo(np.int64).max
_DENSE: Final = 1 << 24
"""Up to so many combinations of rank, category and name are counted in one array."""


def path_totals(path: Path) -> PathTotals:
    """A path by category; the categories sum to the total exactly (up to rounding to floats)."""
    totals = path.totals_ns()
    return PathTotals(
        total_us=sum(totals.values()) / 1e3,
        **{f"{name}_us": value / 1e3 for name, value in totals.items()},
    )


def path_parts(paths: Sequence[Path], leads: Sequence[int], joined: Joined) -> tuple[PathPart, ...]:
    """Sums the pieces of paths by category, rank and name; the largest first.

    A piece on a rank cannot shorten the step by more than its own length, nor, if only that
    rank gets faster, by more than the *lead* with which the rank comes last to where the path
    leaves it: the next collective on the path, or the end of the step.

    Args:
        paths: Of the steady steps, all of one analysis.
        leads: Of each path: how much its last rank ends after the others.
        joined: All messages.
    """
    if not paths:
        return ()
    names = paths[0].names
    category = np.concatenate([path.category for path in paths])
    rank = np.concatenate([path.rank for path in paths])
    name = np.concatenate([path.name for path in paths])
    length = np.concatenate([path.end - path.start for path in paths])
    stride = len(names) + 1
    key = (rank * len(CATEGORIES) + category) * stride + name + 1
    if int(key.max(initial=0)) < _DENSE:
        sums, which = np.bincount(key, weights=length), None
        keys = np.arange(len(sums))
    else:
        keys, which = np.unique(key, return_inverse=True)
        sums = np.bincount(which, weights=length)
    alone = np.minimum(
        length,
        np.concatenate(
            [_leads(path, lead, joined) for path, lead in zip(paths, leads, strict=True)]
        ),
    )
    alone_sums = np.bincount(key if which is None else which, weights=alone)
    total = float(length.sum())
    parts = []
    for i in np.argsort(-sums, kind="stable")[:_SHOWN].tolist():
        if not sums[i]:
            break
        place, code = divmod(int(keys[i]), stride)
        parts.append(
            PathPart(
                category=CATEGORIES[place % len(CATEGORIES)],
                rank=place // len(CATEGORIES),
                name=None if code - 1 == NULL else names[code - 1],
                us=float(sums[i]) / len(paths) / 1e3,
                alone_us=float(alone_sums[i]) / len(paths) / 1e3,
                share=float(sums[i]) / total if total else 0.0,
            )
        )
    return tuple(parts)


def _leads(path: Path, lead: int, joined: Joined) -> IntArray:
    """For each piece: the lead where the path leaves the piece's rank; at most the last.

    Where everybody had come before the rank of the path began to wait, the transfer was under
    way already: what that rank did since then does not hold it up, and what it did before does
    only if it came last.
    """
    leads = np.full(len(path), lead, dtype=np.int64)
    waiting = np.flatnonzero(path.message != NULL)
    if not len(waiting):
        return leads
    message = path.message[waiting]
    collective, releaser = joined.collective[message], joined.releaser[message]
    # What indexes with NULL gets the last entry, appended here for sends and receives.
    last_rank = np.append(joined.collectives.last_rank, NULL)[collective]
    lead_of = np.append(joined.collectives.lead, 0)[collective]
    by_last = (collective != NULL) & (last_rank == releaser)
    # A receive waits for its sender alone, a broadcast for its root: nobody is second.
    bound = np.where(by_last, lead_of, _UNBOUNDED)
    held_up = (releaser == path.rank[np.maximum(waiting - 1, 0)]) | (releaser == NULL)
    bound = np.where(held_up, bound, 0)
    following = np.searchsorted(waiting, np.arange(len(path)), side="left")
    inside = np.flatnonzero(following < len(waiting))
    came = joined.released[message][following[inside]]
    beside = (path.start[inside] >= came) & (came != NULL_NS)
    leads[inside] = np.where(beside, 0, bound[following[inside]])
    leads[waiting] = _UNBOUNDED
    return leads
