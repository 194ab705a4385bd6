"""An engine that executes the tasks of an analysis on a Dask cluster.

Results are fetched in the order of the tasks, and only some tasks are in flight at a time, so that
neither the scheduler nor the workers hold all results. If a worker dies, Dask executes its tasks
again on the others.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final

from ddltrace.analyzer.engine import dask_worker
from ddltrace.analyzer.engine.engine import Item, Progress, Result
from ddltrace.tracer.errors import EngineError
from ddltrace.tracer.optional_packages import require_extra

if TYPE_CHECKING:
    from distributed import Client, Future

_IN_FLIGHT: Final = 3
"""Batches in flight for each thread of a worker: one runs while others are sent and fetched."""
_BATCH_TASKS: Final = 32
_BATCH_EVENTS: Final = 50_000
"""Most events that the tasks of a batch read together: bounds the memory of their results."""
_BATCHES_PER_WORKER: Final = 8


class DaskEngine:
    """Executes tasks on a cluster; see `open_dask`.

    Args:
        client: A client of the cluster.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def workers(self) -> int:
        """The number of threads of all workers."""
        return max(1, int(sum(self._client.nthreads().values())))

    def map(
        self,
        task: Callable[[Item], Result],
        items: Sequence[Item],
        doing: str,
        *,
        one_at_a_time: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> Iterator[Result]:
        """See `Engine.map`. The threads of one worker do not count as one process."""
        batches = _batches(items, None if one_at_a_time else sizes, self.workers)
        packed = (dask_worker.pack(task, batch) for batch in batches)
        futures = (self._submit(dask_worker.execute, work) for work in packed)
        yield from self._fetched(futures, len(items), doing)

    def on_each_worker(self, task: Callable[[Item], Result], item: Item) -> dict[str, Result]:
        """See `Engine.on_each_worker`."""
        with _plain_errors():
            answers = self._client.run(dask_worker.execute, dask_worker.pack(task, [item]))
        return {worker: pickle.loads(answer)[0] for worker, answer in answers.items()}

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        with warnings.catch_warnings():
            # Of imported traces, whose events are in this process, tasks are large.
            warnings.filterwarnings("ignore", message="Sending large graph")
            return self._client.submit(function, *arguments, pure=False)

    def _fetched(self, futures: Iterable[Future[bytes]], total: int, doing: str) -> Iterator[Any]:
        """The results of batches of tasks, in their order, with few in flight."""
        flying: deque[Future[bytes]] = deque()
        most = _IN_FLIGHT * self.workers
        waiting = iter(futures)
        try:
            with Progress(doing, total) as progress, _plain_errors():
                while True:
                    while len(flying) < most and (future := next(waiting, None)) is not None:
                        flying.append(future)
                    if not flying:
                        return
                    results = pickle.loads(flying.popleft().result())
                    progress.advance(len(results))
                    yield from results
        finally:
            if flying:
                with contextlib.suppress(Exception):
                    self._client.cancel(list(flying))


def _batches(
    items: Sequence[Item], sizes: Sequence[int] | None, workers: int
) -> Iterator[Sequence[Item]]:
    """Divides tasks into batches: a task costs the scheduler some milliseconds, however small.

    Args:
        items: The arguments of the tasks.
        sizes: How many events each task reads; None if each needs a batch of its own.
        workers: The number of workers; each gets several batches, so that all end together.
    """
    if sizes is None:
        yield from ([item] for item in items)
        return
    most = min(_BATCH_TASKS, max(1, len(items) // (_BATCHES_PER_WORKER * workers)))
    batch: list[Item] = []
    events = 0
    for item, size in zip(items, sizes, strict=True):
        if batch and (len(batch) >= most or events + size > _BATCH_EVENTS):
            yield batch
            batch, events = [], 0
        batch.append(item)
        events += size
    if batch:
        yield batch


@contextmanager
def open_dask(
    scheduler: str | None = None, *, workers: int | None = None, memory_limit: str = "auto"
) -> Iterator[DaskEngine]:
    """Opens an engine on a Dask cluster, for the time of a `with` block.

    Args:
        scheduler: Address of the scheduler; None for a local cluster of processes, which ends with
            the block.
        workers: Number of processes of a local cluster; by default one per core.
        memory_limit: Memory of each of them, in Dask's notation; by default an equal share of this
            machine's memory.

    Raises:
        MissingCapabilityError: The extra ``dask`` is not installed.
        EngineError: The scheduler does not answer, or has no workers, or they have another version
            of ddltrace.
    """
    require_extra("dask", "--engine dask")
    import dask
    from distributed import Client

    # Errors are reported by this module in one line each.
    for name in ("distributed", "asyncio", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with ExitStack() as stack:
        stack.enter_context(dask.config.set({"distributed.logging.distributed": "critical"}))
        target: Any = scheduler
        if scheduler is None:
            with _interrupts_held_back():
                target = stack.enter_context(_local_cluster(workers, memory_limit))
        try:
            client = stack.enter_context(Client(target, set_as_default=False))
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(
                f"no Dask scheduler answers at {scheduler}: start one with 'dask scheduler', or "
                f"leave out --scheduler for a local cluster ({_first_line(error)})"
            ) from error
        _check_workers(client, scheduler)
        yield DaskEngine(client)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Lets a Ctrl-C take effect at the end of the block: Dask cannot be interrupted when it starts.

    Threads and processes that are started in the block do not receive the signal at all.

    Raises:
        KeyboardInterrupt: One came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Otherwise it is started with the first process, and unblocks the signal for its thread.
    resource_tracker.ensure_running()
    seen: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, former)
        if seen:
            raise KeyboardInterrupt


@contextmanager
def _local_cluster(workers: int | None, memory_limit: str) -> Iterator[Any]:
    from distributed import LocalCluster
    from distributed.security import Security

    with (
        tempfile.TemporaryDirectory(prefix="ddltrace-dask-") as folder,
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory_limit,
            dashboard_address="127.0.0.1:0",
            # Its ports execute what they are sent, and other users of the host reach them.
            security=Security.temporary(),
            silence_logs=logging.CRITICAL + 1,
            local_directory=folder,
            preload=[dask_worker.__name__],
        ) as cluster,
    ):
        with contextlib.suppress(ImportError):  # of no public module
            from distributed.gc import disable_gc_diagnosis

            # Of a Ctrl-C during its callback, Python says only that it was ignored.
            disable_gc_diagnosis(force=True)
        yield cluster


def _check_workers(client: Client, scheduler: str | None) -> None:
    """Raises if there are no workers, or if one of them has another version of ddltrace."""
    import dask
    from dask.utils import parse_timedelta

    timeout = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    place = "the local Dask cluster" if scheduler is None else f"the Dask scheduler at {scheduler}"
    with _plain_errors():
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError as error:
            raise EngineError(
                f"{place} has no workers after {timeout:g} s: start some with 'dask worker'"
            ) from error
        # First with a function that a worker without ddltrace has as well.
        installed = client.run(metadata.version, "ddltrace", on_error="return")
        own = metadata.version("ddltrace")
        for worker, version in installed.items():
            if isinstance(version, metadata.PackageNotFoundError):
                raise EngineError(f"Dask worker {worker} has no ddltrace: install ddltrace {own}")
            if isinstance(version, Exception):
                raise EngineError(f"Dask worker {worker} does not answer ({_first_line(version)})")
            if version != own:
                raise _other_version(worker, version, own)
        try:
            versions = client.run(dask_worker.code_version)
        except (ImportError, AttributeError) as error:
            raise EngineError(
                f"a Dask worker of {place} has another version of ddltrace, without the module "
                f"{dask_worker.__name__}: install ddltrace {dask_worker.code_version()} there"
            ) from error
        for worker, version in versions.items():
            if version != dask_worker.code_version():
                raise _other_version(worker, version, dask_worker.code_version())


def _other_version(worker: str, version: str, own: str) -> EngineError:
    return EngineError(
        f"Dask worker {worker} has ddltrace {version}, this command {own}: install the same "
        "version on all workers"
    )


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turns errors of the cluster into errors of one line; those of tasks remain."""
    from concurrent.futures import CancelledError

    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    try:
        yield
    except KilledWorker as error:
        raise EngineError(
            "several Dask workers ended during the same task, probably for lack of memory: give "
            "each worker more memory, or analyze in smaller ranges of steps (--memory-limit SIZE)"
        ) from error
    except (CancelledError, CommClosedError, TimeoutError) as error:
        raise EngineError(
            f"the connection to the Dask scheduler was lost ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
