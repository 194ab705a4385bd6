"""Groups of the ranks of a large job: those that stand out, then the others by host and class.

A rank stands out if it computes or communicates for an unusually long or short time. Ranks are of
one class if they have the same kinds of tracks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ddltrace.dashboard.timeline.tracks import Timeline

FEWEST_RANKS: Final = 9
"""Fewer ranks are readable without groups."""

_MOST_OUTLIERS: Final = 8
_DEVIATIONS: Final = 5.0
_LEAST_SHARE: Final = 0.05
_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True)
class RankGroup:
    """One group.

    Attributes:
        title: What its ranks have in common.
        ranks: Its ranks, the most unusual one first or ascending.
        is_outliers: Whether its ranks stand out.
    """

    title: str
    ranks: list[int]
    is_outliers: bool = False


def rank_groups(timeline: Timeline, hosts: Mapping[int, str]) -> list[RankGroup]:
    """Groups the ranks of a timeline; none if they are few.

    Args:
        hosts: Rank -> name of its host.
    """
    if len(hosts) < FEWEST_RANKS:
        return []
    unusual = _outliers(timeline, sorted(hosts))
    groups = []
    if unusual:
        groups.append(RankGroup("Outliers", unusual, is_outliers=True))
    kinds: dict[int, set[str]] = {rank: set() for rank in hosts}
    for track in timeline.tracks:
        kinds.setdefault(track.rank, set()).add(track.kind)
    members: dict[tuple[str, frozenset[str]], list[int]] = {}
    for rank in sorted(hosts):
        if rank not in unusual:
            members.setdefault((hosts[rank], frozenset(kinds[rank])), []).append(rank)
    shared = frozenset.intersection(*(frozenset(own) for own in kinds.values()))
    of_host = [host for host, _ in members]
    for (host, own), ranks in members.items():
        title = host or "unknown host"
        if of_host.count(host) > 1:
            title += f", {_class_text(own - shared)}"
        groups.append(RankGroup(title, ranks))
    return groups


def _class_text(kinds: Iterable[str]) -> str:
    return "with " + ", ".join(sorted(kinds)) if kinds else "nothing else"


def _outliers(timeline: Timeline, ranks: list[int]) -> list[int]:
    """The ranks that stand out, the most unusual one first."""
    known = [rank for rank in ranks if rank in timeline.busy]
    if len(known) < FEWEST_RANKS:
        return []
    unusual = np.zeros(len(known))
    for kind in (0, 1):
        total = np.array([float(timeline.busy[rank][kind].covered[-1]) for rank in known])
        unusual = np.maximum(unusual, _deviations(total))
    order = np.argsort(-unusual, kind="stable")[:_MOST_OUTLIERS]
    return [known[i] for i in order.tolist() if unusual[i] > _DEVIATIONS]


def _deviations(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Distances from the median in robust standard deviations; 0 for differences below 5 %."""
    middle = float(np.median(values))
    distance = np.abs(values - middle)
    sigma = _TO_SIGMA * float(np.median(distance))
    far = distance > _LEAST_SHARE * abs(middle)
    return np.where(far, distance / max(sigma, 1e-9 * abs(middle), 1e-9), 0.0)
