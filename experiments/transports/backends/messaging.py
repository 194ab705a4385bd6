"""A process group that implements collectives with plain sends and receives.

A message library implements only the transfer of one tensor between two ranks. All libraries share
the collectives, so that comparisons show the library and not the algorithm. Collectives run one
after the other on a thread of the group, in launch order, as those of Gloo do.
"""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.ring import Ring
from ddltrace.experiments.plan_execution import PlanExecution, rounds_of
from ddltrace.experiments.transports.backends.mailbox import Future, Key, Mailbox, fail

USER: Final = 0
"""Channel of the job's own sends and receives."""
COLLECTIVE: Final = 1
"""Channel of sends and receives inside a collective."""

_REDUCE: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], object]]] = {
    "SUM": lambda total, other: total.add_(other),
    "AVG": lambda total, other: total.add_(other),
    "PRODUCT": lambda total, other: total.mul_(other),
    "MIN": lambda total, other: torch.minimum(total, other, out=total),
    "MAX": lambda total, other: torch.maximum(total, other, out=total),
}


# PyTorch calls the forms with options; the type information requires all overloads.
_ProcessGroup: Final[Any] = dist.ProcessGroup
_Work: Final[Any] = dist._Work  # type: ignore[attr-defined]


class FutureWork(_Work):
    """A send, receive or collective in progress.

    PyTorch's own wrapper of a future treats an error as success: a job would continue with data
    that never arrived.
    """

    def __init__(self, done: Future, timeout_s: float) -> None:
        """Wraps a future.

        Args:
            done: Completes with the operation's tensors.
            timeout_s: Longest time that `wait` takes.
        """
        super().__init__()
        self._done = done
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        done.add_done_callback(lambda _: self._ended.set())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is complete.

        Raises:
            RuntimeError: It failed, or took longer than the timeout.
        """
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        if not self._ended.wait(seconds):
            raise RuntimeError(f"a message did not arrive within {seconds:g} s")
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it has completed or failed."""
        return self._done.done()

    def result(self) -> list[torch.Tensor]:
        """The operation's tensors."""
        return self._done.wait()

    def get_future(self) -> Future:
        """The future itself."""
        return self._done


class MessagingGroup(_ProcessGroup):
    """The base of all process groups over a message library."""

    def __init__(self, name: str, rank: int, size: int, timeout: timedelta) -> None:
        """Starts the thread of the collectives.

        Args:
            name: The backend's name.
            rank: This rank within the group.
            size: Ranks in the group.
            timeout: Longest time to wait for one operation.
        """
        super().__init__(rank, size)
        self._name = name
        self._me = rank
        self._ranks = size
        self._timeout_s = timeout.total_seconds()
        self._count = 0
        self._jobs: queue.SimpleQueue[tuple[Callable[[int], Any], Future] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._run_collectives, name=f"ddltrace-{name}", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def send_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Sends the memory of a contiguous tensor.

        Args:
            tensor: A CPU tensor, which must not change until the future is complete.
            peer: Rank in the group, another one than this.
            channel: `USER` or `COLLECTIVE`.
            tag: Matches the receive with the same tag.

        Returns:
            A future that completes when the tensor may change.
        """

    @abstractmethod
    def receive_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Receives into a contiguous tensor; arguments as those of `send_bytes`."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connections; no operation may be in progress."""

    # Methods that PyTorch calls. Names and arguments are those of `ProcessGroup`.

    def getBackendName(self) -> str:
        """The backend's name."""
        return self._name

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> FutureWork:
        """Sends one tensor."""
        return self._work(self.send_bytes(_contiguous(tensors[0]), dstRank, USER, tag))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> FutureWork:
        """Receives one tensor."""
        into = tensors[0]
        if into.is_contiguous():
            return self._work(self.receive_bytes(into, srcRank, USER, tag))
        return self._work(
            self.receive_bytes(torch.empty_like(into).contiguous(), srcRank, USER, tag).then(
                lambda done: [into.copy_(done.value()[0])]
            )
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> FutureWork:
        """The root sends to each rank."""
        root = opts.rootRank if opts is not None else 0

        def run(tag: int) -> list[torch.Tensor]:
            whole = _contiguous(tensors[0])
            if self._me == root:
                _wait([self._put(whole, peer, tag) for peer in self._others()])
            else:
                self._get(whole, root, tag).wait()
                _copy_back(tensors[0], whole)
            return tensors

        return self._launch(run)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FutureWork:
        """Executes the plan of the architecture ``ring``."""
        operation = _operation(opts)

        def run(tag: int) -> list[torch.Tensor]:
            for tensor in tensors:
                flat = _contiguous(tensor).view(-1)
                plan = Ring().plan(range(self._ranks), flat.numel())
                PlanExecution(
                    rounds_of(self._me, plan),
                    flat,
                    send=lambda values, transfer: self._put(values, transfer.target, tag),
                    receive=lambda into, transfer: self._get(into, transfer.source, tag),
                    combine=_REDUCE[operation],
                ).wait()
                _finish(flat, operation, self._ranks)
                _copy_back(tensor, flat)
            return tensors

        return self._launch(run)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> FutureWork:
        """One `allreduce` for each tensor."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FutureWork:
        """All ranks send to the root, which reduces in the order of ranks."""
        root, operation = opts.rootRank, _operation(opts)

        def run(tag: int) -> list[torch.Tensor]:
            whole = _contiguous(tensors[0])
            if self._me != root:
                self._put(whole, root, tag).wait()
                return tensors
            inbox = {peer: torch.empty_like(whole) for peer in self._others()}
            _wait([self._get(into, peer, tag) for peer, into in inbox.items()])
            for peer in self._others():
                _REDUCE[operation](whole, inbox[peer])
            _finish(whole, operation, self._ranks)
            _copy_back(tensors[0], whole)
            return tensors

        return self._launch(run)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> FutureWork:
        """Each rank sends its tensor to each other rank."""
        del opts
        return self._launch(lambda tag: self._gather_all(outputs[0], inputs[0], tag))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> FutureWork:
        """`allgather` into one tensor."""
        del opts

        def run(tag: int) -> list[torch.Tensor]:
            parts = list(output.view(-1).chunk(self._ranks)) if output.numel() else []
            self._gather_all(parts, tensor, tag)
            return [output]

        return self._launch(run)

    _allgather_base = all_gather_single

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> FutureWork:
        """All ranks send to the root."""
        root = opts.rootRank

        def run(tag: int) -> list[torch.Tensor]:
            own = _contiguous(inputs[0])
            if self._me != root:
                self._put(own, root, tag).wait()
                return inputs
            outputs[0][root].copy_(own)
            self._receive_all({peer: outputs[0][peer] for peer in self._others()}, tag)
            return outputs[0]

        return self._launch(run)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> FutureWork:
        """The root sends each rank its tensor."""
        root = opts.rootRank

        def run(tag: int) -> list[torch.Tensor]:
            if self._me == root:
                outputs[0].copy_(inputs[0][root])
                _wait([self._put(inputs[0][peer], peer, tag) for peer in self._others()])
            else:
                self._receive_all({root: outputs[0]}, tag)
            return outputs

        return self._launch(run)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> FutureWork:
        """Each rank sends each other rank its share, and reduces its own."""
        operation = _operation(opts)
        return self._launch(lambda tag: [self._reduce_own(outputs[0], inputs[0], operation, tag)])

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> FutureWork:
        """`reduce_scatter` from one tensor."""
        operation = _operation(opts)

        def run(tag: int) -> list[torch.Tensor]:
            parts = list(_contiguous(tensor).view(-1).chunk(self._ranks))
            return [self._reduce_own(output, parts, operation, tag)] if parts else [output]

        return self._launch(run)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> FutureWork:
        """Each rank sends each other rank a tensor."""
        del opts
        return self._launch(lambda tag: self._exchange(outputs, inputs, tag))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> FutureWork:
        """`alltoall` of the rows of one tensor."""
        del opts

        def run(tag: int) -> list[torch.Tensor]:
            self._exchange(
                _rows(output, output_splits, self._ranks),
                _rows(_contiguous(tensor), input_splits, self._ranks),
                tag,
            )
            return [output]

        return self._launch(run)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> FutureWork:
        """An `allgather` of one byte."""
        del opts
        own = torch.zeros(1, dtype=torch.uint8)
        outputs = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._ranks)]
        return self._launch(lambda tag: self._gather_all(outputs, own, tag))

    def shutdown(self) -> None:
        """Ends the group's threads and connections."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
            self.close()

    abort = shutdown

    def _launch(self, run: Callable[[int], Any]) -> FutureWork:
        done: Future = torch.futures.Future()
        self._jobs.put((run, done))
        return self._work(done)

    def _work(self, done: Future) -> FutureWork:
        return FutureWork(done, self._timeout_s)

    def _run_collectives(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, done = job
            self._count += 1
            try:
                with torch.no_grad():
                    result = run(self._count & 0xFFFFFF)
            except Exception as error:  # noqa: BLE001 - raised where the job waits
                fail(done, error)
            else:
                done.set_result(list(result))

    def _others(self) -> list[int]:
        return [peer for peer in range(self._ranks) if peer != self._me]

    def _put(self, tensor: torch.Tensor, peer: int, tag: int) -> Future:
        return self.send_bytes(_contiguous(tensor), peer, COLLECTIVE, tag)

    def _get(self, tensor: torch.Tensor, peer: int, tag: int) -> Future:
        return self.receive_bytes(tensor, peer, COLLECTIVE, tag)

    def _receive_all(self, into: dict[int, torch.Tensor], tag: int) -> None:
        buffers = {peer: _contiguous(tensor) for peer, tensor in into.items()}
        _wait([self._get(buffer, peer, tag) for peer, buffer in buffers.items()])
        for peer, tensor in into.items():
            _copy_back(tensor, buffers[peer])

    def _gather_all(
        self, outputs: Sequence[torch.Tensor], own: torch.Tensor, tag: int
    ) -> list[torch.Tensor]:
        if not outputs:
            return []
        return self._exchange(outputs, [own.view_as(outputs[self._me])] * self._ranks, tag)

    def _exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], tag: int
    ) -> list[torch.Tensor]:
        sends = [self._put(inputs[peer], peer, tag) for peer in self._others()]
        outputs[self._me].copy_(inputs[self._me])
        self._receive_all({peer: outputs[peer] for peer in self._others()}, tag)
        _wait(sends)
        return list(outputs)

    def _reduce_own(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], operation: str, tag: int
    ) -> torch.Tensor:
        own = _contiguous(parts[self._me]).clone()
        inbox = {peer: torch.empty_like(own) for peer in self._others()}
        sends = [self._put(parts[peer], peer, tag) for peer in self._others()]
        _wait([self._get(into, peer, tag) for peer, into in inbox.items()])
        _wait(sends)
        for peer in self._others():
            _REDUCE[operation](own, inbox[peer])
        _finish(own, operation, self._ranks)
        output.copy_(own.view_as(output))
        return output


class MailboxGroup(MessagingGroup):
    """The base of groups whose library delivers messages on threads of its own."""

    def __init__(self, name: str, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(name, rank, size, timeout)
        self._mailbox = Mailbox()
        self._threads: list[threading.Thread] = []

    def receive_bytes(self, tensor: torch.Tensor, peer: int, channel: int, tag: int) -> Future:
        """Asks the mailbox."""
        return self._mailbox.receive(Key(peer, channel, tag), tensor)

    def _start(self, job: Callable[..., None], *arguments: Any) -> None:
        """Runs a job on a thread of its own."""
        name = f"ddltrace-{self._name}"
        thread = threading.Thread(target=job, args=arguments, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)


def _wait(futures: Sequence[Future]) -> None:
    for future in futures:
        future.wait()


def _operation(opts: Any) -> str:
    operation = "SUM" if opts is None else _name_of(opts.reduceOp)
    if operation not in _REDUCE:
        raise RuntimeError(f"this backend cannot reduce by {operation}")
    return operation


def _name_of(operation: Any) -> str:
    return next(
        (name for name in _REDUCE if operation == getattr(dist.ReduceOp, name)), str(operation)
    )


def _finish(total: torch.Tensor, operation: str, ranks: int) -> None:
    if operation == "AVG":
        total.div_(ranks)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _copy_back(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies received data from a contiguous copy back to a tensor, unless both are the same."""
    if tensor.data_ptr() != buffer.data_ptr():
        tensor.copy_(buffer.view_as(tensor))


def _rows(tensor: torch.Tensor, splits: list[int] | None, ranks: int) -> list[torch.Tensor]:
    return list(torch.split(tensor, splits) if splits else tensor.tensor_split(ranks))
