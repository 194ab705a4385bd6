"""Jobs that run beside each other in one trace, such as the roles of reinforcement learning.

Each has a default process group of its own, so each numbers its ranks from 0 and names its groups
as the others do. In the trace, the ranks of the second job follow those of the first, and so on.
Groups that members of several jobs created together are recognized by the store at which they met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo
from ddltrace.tracer.trace.schema import EVENTS

_MOST_NAMED: Final = 8
_MAX_RANKS: Final = 1 << 24

Meeting: TypeAlias = tuple[str, str]
"""The store at which the members of a group met, and the group's name."""


@dataclass(frozen=True)
class JobPlace:
    """How the ranks and groups of a process are called in the trace.

    Attributes:
        first: Rank 0 of its job.
        names: Group as the process recorded it -> its name.
        peers: Group that reaches beyond the job, as recorded -> for each of its members as
            recorded, the rank; -1 for one that recorded nothing.
    """

    first: int
    names: dict[str, str] = field(default_factory=dict)
    peers: dict[str, dict[int, int]] = field(default_factory=dict)

    def placed(self, events: pa.Table) -> pa.Table:
        """Some events of the process with the names and numbers of the trace."""
        if not {"group", "peer"} <= set(events.column_names):
            return events
        group = events["group"].combine_chunks()
        words = group.dictionary.to_pylist()
        codes = group.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
        recorded = events["peer"].fill_null(-1).to_numpy()
        peer = np.where(recorded < 0, -1, recorded + self.first)
        for code, word in enumerate(words):
            if word in self.peers:
                rows = codes == code
                members = self.peers[word]
                peer[rows] = [members.get(rank, -1) for rank in recorded[rows].tolist()]
        renamed = pa.array([self.names.get(word, word) for word in words], pa.string())
        columns = {
            "group": pa.DictionaryArray.from_arrays(group.indices, renamed),
            "peer": pa.array(peer, pa.int32(), mask=peer < 0),
        }
        for name, column in columns.items():
            at = events.schema.get_field_index(name)
            events = events.set_column(at, EVENTS.field(name), column)
        return events


def jobs_of(infos: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """The processes of each job; without any if they cannot be numbered.

    The jobs stand in an order that is the same in each run of the command: by their first places in
    groups of several jobs, then by role, then by their starts.
    """
    jobs: dict[str, list[RankInfo]] = {}
    for info in sorted(infos, key=_began):
        if info.store is None:
            return []
        jobs.setdefault(info.store, []).append(info)
    if sum(map(_size, jobs.values())) > _MAX_RANKS:
        return []
    return sorted(jobs.values(), key=_order)


def meetings_of(job: Sequence[RankInfo]) -> set[Meeting]:
    """The groups that members of a job did not create by the job's own store."""
    return {
        (group.store, group.name)
        for info in job
        for group in info.groups
        if group.store is not None
    }


def number_ranks(
    jobs: Sequence[Sequence[RankInfo]],
) -> tuple[list[RankInfo], dict[str, JobPlace]]:
    """Numbers the ranks of all jobs, one job after the other.

    Returns:
        The processes as they are called in the trace, and their places by segment name.
    """
    firsts, total = [], 0
    for job in jobs:
        firsts.append(total)
        total += _size(job)
    members: dict[Meeting, dict[int, int]] = {}
    for first, job in zip(firsts, jobs, strict=True):
        for info in job:
            for group in info.groups:
                if group.store is not None and group.place is not None:
                    met = members.setdefault((group.store, group.name), {})
                    met[group.place] = first + info.rank
    home = _domain_of_rank_0(jobs[0])
    infos, places = [], {}
    known: dict[GroupInfo, GroupInfo] = {}
    for first, job in zip(firsts, jobs, strict=True):
        for info in job:
            place = places[info.segment] = JobPlace(first)
            groups = []
            for group in info.groups:
                if group.store is None:
                    moved = replace(
                        group,
                        name=f"{group.name} (ranks {_numbers(first, job)})",
                        ranks=tuple(rank + first for rank in group.ranks),
                    )
                else:
                    moved = _of_several_jobs(group, members)
                    met = members.get((group.store, group.name), {})
                    place.peers[group.name] = {
                        rank: met.get(number, -1) for number, rank in enumerate(group.ranks)
                    }
                place.names[group.name] = moved.name
                groups.append(known.setdefault(moved, moved))
            changed = replace(info, rank=info.rank + first, world_size=total, groups=groups)
            if _domain_of_rank_0(job) != home:
                # They compare with the clock of the job's own rank 0.
                changed.clock = {**info.clock, "samples": []}
            infos.append(changed)
    return infos, places


def text_of_jobs(jobs: Sequence[Sequence[RankInfo]]) -> str:
    """The note that says how the ranks of each job are numbered."""
    texts, first = [], 0
    for job in jobs[:_MOST_NAMED]:
        roles = sorted({info.role for info in job if info.role})
        texts.append(f"{_numbers(first, job)} ({', '.join(roles) or 'no role'})")
        first += _size(job)
    more = f" and {len(jobs) - _MOST_NAMED} more" if len(jobs) > _MOST_NAMED else ""
    return f"{len(jobs)} jobs beside each other: their ranks are {', '.join(texts)}{more} here"


def _numbers(first: int, job: Sequence[RankInfo]) -> str:
    last = first + _size(job) - 1
    return str(first) if first == last else f"{first}-{last}"


def _of_several_jobs(group: GroupInfo, members: dict[Meeting, dict[int, int]]) -> GroupInfo:
    assert group.store is not None
    met = members.get((group.store, group.name), {})
    size = group.size or len(group.ranks)
    several = len({store for store, name in members if name == group.name}) > 1
    complete = len(met) == size and max(met, default=-1) < size
    return replace(
        group,
        name=f"{group.name} at {group.store}" if several else group.name,
        ranks=tuple(met[number] for number in range(size)) if complete else (),
        size=size,
    )


def _order(job: Sequence[RankInfo]) -> tuple[int, str, tuple[int, str]]:
    places = [g.place for info in job for g in info.groups if g.place is not None]
    roles = [info.role for info in job if info.role]
    return min(places, default=_MAX_RANKS), min(roles, default=""), _began(job[0])


def _size(job: Sequence[RankInfo]) -> int:
    return max(max(info.world_size, info.rank + 1) for info in job)


def _domain_of_rank_0(job: Sequence[RankInfo]) -> str | None:
    return next((info.clock_domain for info in job if info.rank == 0), None)


def _began(info: RankInfo) -> tuple[int, str]:
    began = info.clock.get("unix_ns")
    return began if isinstance(began, int) else 0, info.segment
