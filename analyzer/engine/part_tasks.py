"""Tasks on parts of a trace, such as its ranks, whose notes are added to those of the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ddltrace.analyzer.engine.engine import Engine

Result = TypeVar("Result")


class Notes(Protocol):
    """What was noted while something was read."""

    @property
    def notes(self) -> list[str]:
        """Problems found in reading it."""

    @property
    def damage(self) -> list[str]:
        """The notes that report damage."""

    @property
    def verified(self) -> dict[str, bool]:
        """File -> whether it has its checksum, for the files that were compared with it."""


class Part(Notes, Protocol):
    """A part of a trace: what one task reads."""

    @property
    def size(self) -> int:
        """How many events its files have; very many if that is not known."""


class Whole(Protocol):
    """A trace that consists of parts."""

    engine: Engine

    def add_notes(self, part: Notes) -> None:
        """Adds the notes of a part, without those that it has."""


PartT = TypeVar("PartT", bound=Part)


@dataclass(frozen=True)
class PartWithData(Generic[PartT]):
    """A part of a trace with further data that its task needs; a `Part` itself.

    Attributes:
        trace: The part of the trace.
    """

    trace: PartT

    @property
    def size(self) -> int:
        """See `Part`."""
        return self.trace.size

    @property
    def notes(self) -> list[str]:
        """See `Notes`."""
        return self.trace.notes

    @property
    def damage(self) -> list[str]:
        """See `Notes`."""
        return self.trace.damage

    @property
    def verified(self) -> dict[str, bool]:
        """See `Notes`."""
        return self.trace.verified


class _Work(NamedTuple, Generic[PartT, Result]):
    task: Callable[[PartT], Result]
    part: PartT


class _Answer(NamedTuple, Generic[Result]):
    """A result, and what was noted while it was computed."""

    result: Result
    notes: list[str]
    damage: list[str]
    verified: dict[str, bool]


def map_parts(
    whole: Whole,
    task: Callable[[PartT], Result],
    parts: Sequence[PartT],
    doing: str,
    *,
    one_at_a_time: bool = False,
) -> Iterator[Result]:
    """Executes a task for each part on the engine of the trace.

    Args:
        whole: The trace; its notes are in the order of the parts, not of their execution.
        task: The task.
        parts: Its arguments.
        doing: What the tasks do, see `Engine.map`.
        one_at_a_time: See `Engine.map`.

    Yields:
        One result for each part, in order.
    """
    work = [_Work(task, part) for part in parts]
    sizes = [part.size for part in parts]
    answers = whole.engine.map(_execute, work, doing, one_at_a_time=one_at_a_time, sizes=sizes)
    for answer in answers:
        whole.add_notes(answer)
        yield answer.result


def _execute(work: _Work[PartT, Result]) -> _Answer[Result]:
    part = work.part
    result = work.task(part)
    return _Answer(result, part.notes, part.damage, part.verified)
