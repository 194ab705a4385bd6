"""The engine of an analysis: executes tasks that do not depend on each other.

A measure hands its tasks to the engine of the trace and combines the results in the order of the
tasks. So an analysis is the same to the last digit wherever and in whatever order the tasks run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

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
            task: The task.
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
