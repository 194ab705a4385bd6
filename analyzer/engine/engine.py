"""The engine of an analysis: executes tasks that do not depend on each other.

A measure hands its tasks to the engine of the trace and combines the results in the order of the
tasks. So an analysis is the same to the last digit wherever and in whatever order the tasks run.
Tasks on parts of a trace, such as its ranks, add their notes to those of the trace.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TextIO, TypeVar

from ddltrace.tracer.errors import DdltraceError, EngineError

if TYPE_CHECKING:
    from ddltrace.tracer.storage.location import Location

Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    """Executes tasks, which are functions of modules; items and results can be pickled."""

    @property
    def workers(self) -> int:
        """How many tasks run at the same time."""

    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        doing: str,
        *,
        one_at_a_time: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> Iterator[Result]:
        """Executes a task for each item.

        Args:
            items: Its arguments.
            doing: What the tasks do, for messages of progress, such as ``reading ranks``.
            one_at_a_time: A task needs so much memory that one process executes only one of them
                at a time.
            sizes: How many events each task reads; an engine may send small ones to a worker
                together. By default, all count as large.

        Yields:
            One result for each item, in the order of the items.

        Raises:
            DdltraceError: A task raised it, or the engine cannot go on.
        """

    def on_each_worker(self, task: Callable[[Item], Result], item: Item) -> dict[str, Result]:
        """Executes a task once on each worker that is another process.

        Returns:
            Name of the worker -> its result; empty if tasks run in this process.
        """


class EmbeddedEngine:
    """Executes tasks on threads of this process, as many as there are cores.

    Threads suffice: NumPy and Arrow release the interpreter lock in long operations, and nothing is
    copied between processes.
    """

    @property
    def workers(self) -> int:
        """The number of cores."""
        return os.cpu_count() or 1

    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        doing: str,
        *,
        one_at_a_time: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> Iterator[Result]:
        """See `Engine.map`."""
        del doing, sizes
        if one_at_a_time or len(items) < 2:
            yield from map(task, items)
            return
        with ThreadPoolExecutor(min(self.workers, len(items))) as pool:
            yield from pool.map(task, items)

    def on_each_worker(self, task: Callable[[Item], Result], item: Item) -> dict[str, Result]:
        """See `Engine.on_each_worker`."""
        del task, item
        return {}


_HEAD_BYTES: Final = 1 << 20


def check_shared(engine: Engine, file: Location) -> None:
    """Checks a file that is typical of those that the tasks will read.

    Raises:
        EngineError: A worker does not see the file, or sees another one.
    """
    own = _digest(file.absolute())
    for worker, seen in engine.on_each_worker(_digest, file.absolute()).items():
        if seen != own:
            problem = "does not see" if not seen else "sees another file at"
            remedy = (
                "put the files on a filesystem that all workers mount at the same path"
                if isinstance(file, Path)
                else "start the workers with the store's endpoint and credentials"
            )
            raise EngineError(f"Dask worker {worker} {problem} {file.absolute()}: {remedy}")


def _digest(file: Location) -> str:
    """A digest of the beginning of a file; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.sha256(opened.read(_HEAD_BYTES)).hexdigest()
    except (OSError, DdltraceError):
        return ""


_QUIET_S: Final = 1.0
"""Tasks that are done sooner are not reported."""
_LOG_EVERY_S: Final = 10.0


class Progress:
    """Reports how many of some tasks are done, for the time of a `with` block.

    Args:
        doing: What the tasks do.
        total: How many there are.
        out: Where to write, by default stderr.
    """

    def __init__(self, doing: str, total: int, out: TextIO | None = None) -> None:
        self._doing, self._total = doing, total
        self._out = sys.stderr if out is None else out
        self._live = self._out.isatty()
        self._done = 0
        self._next = time.monotonic() + _QUIET_S
        self._width = 0

    def advance(self, tasks: int = 1) -> None:
        """Counts more tasks as done."""
        self._done += tasks
        now = time.monotonic()
        if now >= self._next and self._done < self._total:
            self._show("" if self._live else "\n")
            self._next = now + (_QUIET_S / 4 if self._live else _LOG_EVERY_S)

    def _show(self, end: str) -> None:
        text = f"ddltrace: {self._doing}: {self._done:,} of {self._total:,}"
        start = "\r" if self._live else ""
        self._width = len(text)
        self._out.write(f"{start}{text}{end}")
        self._out.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live and self._width:
            self._out.write(f"\r{' ' * self._width}\r")
            self._out.flush()


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


class Parted(Protocol):
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
    whole: Parted,
    task: Callable[[PartT], Result],
    parts: Sequence[PartT],
    doing: str,
    *,
    one_at_a_time: bool = False,
) -> Iterator[Result]:
    """Executes a task for each part on the engine of the trace.

    Args:
        whole: The trace; its notes are in the order of the parts, not of their execution.
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
