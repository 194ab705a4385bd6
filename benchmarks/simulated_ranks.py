"""Ranks of one job as threads of one process, of which exactly one runs at any time.

The ranks execute the project's own exchanges, policies and optimizer rules; only the process
group is another one, whose collectives copy between the threads. An all-reduce adds the ranks'
tensors in the order of the ranks. With two ranks the result is that of Gloo to the last bit;
with more, sums of floats may differ from Gloo's by rounding.

Used by benchmarks/convergence.py and by the tests: a rank costs neither a process nor a socket,
and ranks do not disturb each other by waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import greenlet
import torch
import torch.distributed as dist

_Result = TypeVar("_Result")


class SimulatedRanks:
    """Some ranks that take turns."""

    def __init__(self, size: int) -> None:
        """Makes the ranks.

        Args:
            size: How many.
        """
        self.size = size
        self._ranks: list[greenlet.greenlet] = []
        self._calls: dict[tuple[str, int], list[Any]] = {}

    def run(self, work: Callable[[int], _Result]) -> list[_Result]:
        """Runs a function once for each rank.

        Args:
            work: Called with the number of the rank.

        Returns:
            What the ranks returned.

        Raises:
            Exception: The first exception that a rank raised. The others go no further.
        """
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            torch.set_grad_enabled(True)
            results[rank] = work(rank)

        self._calls.clear()
        self._ranks = [greenlet.greenlet(one) for _ in range(self.size)]
        waiting = list(range(self.size))
        while waiting:
            for rank in waiting:
                # A rank that has begun takes no argument: it continues in `wait`.
                self._ranks[rank].switch(*(() if self._ranks[rank] else (rank,)))
            waiting = [rank for rank in waiting if not self._ranks[rank].dead]
        return results

    def group(self, rank: int, name: str) -> dist.ProcessGroup:
        """A process group of all ranks, as one of them sees it.

        Args:
            rank: The rank that will use it.
            name: Name of the group; equal names are the same group.
        """
        return _SimulatedGroup(self, rank, name)

    def wait(self, done: Callable[[], bool]) -> None:
        """Lets the other ranks run until something has happened."""
        while not done():
            # The ranks share a thread, and with it what PyTorch keeps for each thread.
            grad_enabled = torch.is_grad_enabled()
            greenlet.getcurrent().parent.switch()
            torch.set_grad_enabled(grad_enabled)

    def join(self, key: tuple[str, int], rank: int, entry: Any) -> list[Any] | None:
        """Takes part in a collective; the last rank to do so gets the entries of all."""
        entries = self._calls.setdefault(key, [None] * self.size)
        entries[rank] = entry
        return self._calls.pop(key) if all(e is not None for e in entries) else None


class _Work:
    """One rank's part of a collective."""

    def __init__(self, ranks: SimulatedRanks) -> None:
        self._ranks = ranks
        self.done = False

    def wait(self, timeout: Any = None) -> bool:
        """Lets other ranks run until all have taken part."""
        del timeout
        self._ranks.wait(lambda: self.done)
        return True


class _SimulatedGroup(dist.ProcessGroup):
    """Collectives that the last rank to arrive executes for all."""

    def __init__(self, ranks: SimulatedRanks, rank: int, name: str) -> None:
        super().__init__(rank, ranks.size)  # type: ignore[call-arg]
        self._ranks, self._own, self._label = ranks, rank, name
        self._calls = 0

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> Any:
        """Adds, or takes the maximum, in place."""
        (tensor,) = tensors

        def execute(every: list[torch.Tensor]) -> None:
            if opts.reduceOp == dist.ReduceOp.MAX:
                result = torch.stack(every).amax(0)
            else:
                assert opts.reduceOp == dist.ReduceOp.SUM
                result = every[0].clone()
                for other in every[1:]:
                    result += other
            for target in every:
                target.copy_(result)

        return self._launch(tensor, execute)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Copies every rank's tensor to all."""
        del opts

        def execute(every: list[Any]) -> None:
            for targets, _ in every:
                for target, (_, source) in zip(targets, every, strict=True):
                    target.copy_(source)

        return self._launch((outputs[0], inputs[0]), execute)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
    ) -> Any:
        """Copies the parts of every rank's tensor, one to each rank."""
        del opts

        def execute(every: list[Any]) -> None:
            parts = [one.split(sizes) for _, one, _, sizes in every]
            for rank, (target, _, sizes, _) in enumerate(every):
                for place, sender in zip(target.split(sizes), parts, strict=True):
                    place.copy_(sender[rank])

        return self._launch((output, source, output_sizes, input_sizes), execute)

    def _launch(self, entry: Any, execute: Callable[[list[Any]], None]) -> _Work:
        key = (self._label, self._calls)
        self._calls += 1
        work = _Work(self._ranks)
        every = self._ranks.join(key, self._own, (work, entry))
        if every is not None:
            with torch.no_grad():
                execute([one for _, one in every])
            for arrived, _ in every:
                arrived.done = True
        return work
