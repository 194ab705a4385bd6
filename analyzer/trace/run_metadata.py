"""What the metadata of a run says about its ranks: their processes, tensors and process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Final

from ddltrace.analyzer.engine.engine import Notes
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.storage.location import Location
from ddltrace.tracer.trace.run_files import CHANGED
from ddltrace.tracer.trace.run_info import GroupInfo, RankInfo, RunInfo, TensorInfo

_GENERATION_MARK: Final = "@"


class RunMetadata:
    """The ranks of a run, and the notes on it.

    Attributes:
        path: Where it was opened.
        name: How reports call it: the last part of the path.
        run: Metadata of the run.
        ranks: The ranks of which something was recorded, ascending.
        notes: Problems that affect the numbers; grows while reading.
        damage: The notes that report damage of what was read so far: a wrong checksum or
            unreadable bytes.
        verified: Segment name -> whether the file of that process has its checksum, once compared.
    """

    def __init__(self, path: Location, run: RunInfo) -> None:
        self.path = path
        self.name = path.resolve().name or str(path)
        self.run = run
        self.ranks = sorted({info.rank for info in run.ranks})
        self.notes = list(dict.fromkeys(str(note) for note in run.notes))
        self.damage = [note for note in self.notes if note == CHANGED]
        self.verified: dict[str, bool] = {}

    @property
    def size(self) -> int:
        """How many events its files have; very many if a process has not counted them yet."""
        counts = [info.events for info in self.run.ranks]
        return sys.maxsize if None in counts else sum(filter(None, counts))

    def add_notes(self, part: Notes) -> None:
        """Adds the notes of a part of the trace, without those that it has."""
        for note in part.notes:
            self._note(note)
        for note in part.damage:
            self._note_damage(note)
        self.verified.update(part.verified)

    def infos(self, rank: int) -> list[RankInfo]:
        """Returns the metadata of each process of a rank, in the order of generations.

        Raises:
            TraceError: The trace has nothing of that rank.
        """
        if rank not in self._infos:
            raise TraceError(f"{self.name} has no rank {rank}")
        return list(self._infos[rank])

    @cached_property
    def _infos(self) -> dict[int, list[RankInfo]]:
        """Rank -> the metadata of its processes, in the order of generations."""
        found: dict[int, list[RankInfo]] = {}
        for info in sorted(self.run.ranks, key=lambda info: self._generations[info.segment]):
            found.setdefault(info.rank, []).append(info)
        return found

    def tensors(self, rank: int) -> list[TensorInfo]:
        """Returns the parameters that a rank's events refer to by id."""
        for info in reversed(self.infos(rank)):
            if info.tensors:
                return info.tensors
        return []

    def tensor_names(self, rank: int) -> dict[int, str]:
        """Returns the names of a rank's parameters by id."""
        return {info.id: info.name for info in self.tensors(rank)}

    def group_ranks(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """Global ranks of the members of a process group; empty if the trace does not say.

        Args:
            name: The group's name in the events.
            rank: Ask this rank: ranks may use one name for different groups.
        """
        for known in (None,) if rank is None else (rank, None):
            group = self._groups.get((name, known))
            if group is not None and group.ranks:
                return group.ranks
        return ()

    def group_size(self, name: str) -> int | None:
        """How many members a process group has whose members are unknown; None if unknown too."""
        group = self._groups.get((name, None))
        return None if group is None else group.size

    def group_backend(self, name: str) -> str:
        """Backend of a process group; empty if the trace does not say."""
        group = self._groups.get((name, None))
        return "" if group is None else group.backend

    def group_description(self, name: str, rank: int) -> str:
        """What the job calls a process group, on one rank; empty if the trace does not say."""
        group = self._groups.get((name, rank)) or self._groups.get((name, None))
        return "" if group is None else group.description

    @cached_property
    def _groups(self) -> dict[tuple[str, int | None], GroupInfo]:
        """Name and rank -> the group; with None for the rank, that of any rank."""
        groups: dict[tuple[str, int | None], GroupInfo] = {}
        for info in self.run.ranks:
            for group in info.groups:
                # Each generation has its own groups: a job may be restarted with fewer ranks.
                name = name_in(self._generations[info.segment], group.name)
                groups[name, info.rank] = group
                groups.setdefault((name, None), group)
        return groups

    def generation(self, info: RankInfo) -> int:
        """How often the job was started anew before a process of it."""
        return self._generations[info.segment]

    @cached_property
    def _generations(self) -> dict[str, int]:
        """Segment name -> generation of the job that it belongs to, from 0."""
        processes: dict[int, dict[int, list[RankInfo]]] = {}
        for info in sorted(self.run.ranks, key=_age):
            processes.setdefault(info.attempt, {}).setdefault(info.rank, []).append(info)
        keys: dict[str, tuple[int, int]] = {}
        for attempt, of_rank in processes.items():
            for infos, ordinals in zip(of_rank.values(), _ordinals(of_rank), strict=True):
                keys |= {
                    info.segment: (attempt, ordinal)
                    for info, ordinal in zip(infos, ordinals, strict=True)
                }
        order = {key: number for number, key in enumerate(sorted(set(keys.values())))}
        return {segment: order[key] for segment, key in keys.items()}

    def _note_damage(self, text: str) -> None:
        self._note(text)
        if text not in self.damage:
            self.damage.append(text)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def name_in(generation: int, group: str) -> str:
    """A group's name in the trace: groups of the second job and later ones are marked."""
    return f"{group}{_GENERATION_MARK}{generation + 1}" if generation else group


def _ordinals(processes: dict[int, list[RankInfo]]) -> Iterator[list[int]]:
    """For each rank, which of the successive jobs of one attempt each of its processes is of.

    Worlds may shrink and grow: the rank with most processes says how large the jobs were, and each
    process of another rank is of the next job of its size.

    Args:
        processes: Rank -> its processes, in the order of time.
    """
    sizes = [info.world_size for info in max(processes.values(), key=len)]
    for infos in processes.values():
        ordinals: list[int] = []
        for info in infos:
            after = ordinals[-1] + 1 if ordinals else 0
            same = (n for n in range(after, len(sizes)) if sizes[n] == info.world_size)
            ordinals.append(next(same, after))
        yield ordinals


def _age(info: RankInfo) -> tuple[int, int, int]:
    started = info.clock.get("unix_ns")
    return info.attempt, started if isinstance(started, int) else 0, info.pid or 0
