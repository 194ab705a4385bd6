"""The slowdown of a job by stragglers: its replay compared with that of an ideal job.

For traces of ByteDance's StragglerAnalysis, by its definitions (see
`IdealJob`), so that its published figures can be compared with. The slowdown of one
replica needs no replay of its own: all other replicas have ideal durations and are alike, so the
replica and one ideal replica beside it suffice.

The model of a replay is that of Lin et al., "Understanding Stragglers in Large Model Training Using
What-if Analysis", OSDI 2025, section 3: an operation starts when the last operation that it depends
on has ended; a computation ends after its duration; a communication ends after its *transfer
duration*, counted from when the last of its participants has started. All steps and replicas have
the same dependencies, so one walk over the operations replays all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.events.event_columns import (
    NULL,
    NULL_NS,
    FloatArray,
    IntArray,
    changes,
    place_in,
)
from ddltrace.analyzer.importers.straggler_analysis.operations import (
    BACKWARD,
    CHUNK_MARK,
    CLIP,
    COLLECTIVES,
    COMPUTE,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    GRADS_SCATTER,
    GRADS_SEPARATE,
    LAYERNORM,
    OPERATIONS,
    OPTIMIZER,
    PARAMS_GATHER,
    PIPELINE,
    WORKERS_LABEL,
    Call,
    Operation,
    Recorded,
    by_start,
    match_calls,
)
from ddltrace.analyzer.measures.measure import derived
from ddltrace.tracer.errors import TraceError
from ddltrace.tracer.number_text import agreeing

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_ALL_REPLICAS: Final = frozenset({*DATA_PARALLEL, CLIP})


@dataclass(frozen=True)
class Exchange:
    """Operations that end together: a communication on all its stages, or one computation.

    Attributes:
        operations: Places in `OperationGraph.operations`.
        depends: For each of them, the places of the operations that it depends on.
        is_message: Whether it is a communication.
        all_replicas: Whether the replicas take part in it together.
    """

    operations: tuple[int, ...]
    depends: tuple[tuple[int, ...], ...]
    is_message: bool
    all_replicas: bool


@dataclass(frozen=True)
class OperationGraph:
    """The operations of a step in one replica, and their dependencies.

    Attributes:
        operations: All operations.
        exchanges: In an order in which each comes after all that it depends on.
    """

    operations: tuple[Operation, ...]
    exchanges: tuple[Exchange, ...]

    def replay(self, durations: FloatArray) -> FloatArray:
        """Step times with given durations.

        Args:
            durations: The duration of each computation and the transfer duration of each
                communication. Shape (operations, runs, replicas).

        Returns:
            The end of the last operation after the start of the step, shape (runs,).
        """
        ends: list[FloatArray] = [durations[0]] * len(self.operations)
        last = np.zeros(durations.shape[1:])
        for exchange in self.exchanges:
            released = np.zeros(durations.shape[1:])
            for depends in exchange.depends:
                for place in depends:
                    released = np.maximum(released, ends[place])
            if exchange.all_replicas:
                released = np.broadcast_to(released.max(axis=1, keepdims=True), released.shape)
            for place in exchange.operations:
                ends[place] = released + durations[place]
                last = np.maximum(last, ends[place])
        return np.asarray(last.max(axis=1), np.float64)


def find_graph(recorded: Sequence[Recorded], stages: int) -> OperationGraph:
    """The dependencies of the operations.

    Args:
        recorded: The operations of one replica in one step, whose order determines the schedule of
            the pipeline.
        stages: Number of pipeline stages.

    Raises:
        TraceError: Sends and receives do not match, or operations depend on each other in a
            circle.
    """
    ordered = by_start(recorded)
    builder = _Builder({each.operation: place for place, each in enumerate(ordered)})
    calls = match_calls(recorded, stages)
    data_parallel = any(each.operation.name in DATA_PARALLEL for each in recorded)
    overlapped = any(each.operation.name == GRADS_SEPARATE for each in recorded)
    for stage in range(stages):
        mine = [each for each in ordered if each.operation.stage == stage]
        computed = [each for each in mine if each.operation.name in COMPUTE]
        if not computed:
            raise TraceError(f"stage {stage} has no computation")
        builder.chain([each.operation for each in computed])
        for name in PIPELINE:
            builder.chain([each.operation for each in mine if each.operation.name == name])
        _add_first_backward(builder, computed, stage)
        if data_parallel:
            exchanged = [
                each for each in mine if each.operation.name in (PARAMS_GATHER, GRADS_SCATTER)
            ]
            builder.chain([each.operation for each in exchanged])
            _add_parameters(builder, computed, exchanged)
            if overlapped:
                _add_gradients(builder, computed, exchanged)
        ends = stage in (0, stages - 1)
        _add_update(builder, computed, mine, overlapped=overlapped, has_embedding=ends)
    _add_calls(builder, calls)
    return builder.graph(_groups(builder, calls, stages))


@dataclass
class _Builder:
    """Dependencies as they are found.

    Attributes:
        places: Operation -> its place.
        depends: Place -> places of the operations that it depends on.
    """

    places: dict[Operation, int]
    depends: dict[int, set[int]] = field(default_factory=dict)

    def add(self, operation: Operation, *depends: Operation) -> None:
        """Adds dependencies of an operation; an operation that was not recorded has none."""
        if operation in self.places:
            known = (self.places[each] for each in depends if each in self.places)
            self.depends.setdefault(self.places[operation], set()).update(known)

    def chain(self, operations: Iterable[Operation], *first: Operation) -> None:
        """Each recorded operation depends on the former, and the first one on `first`."""
        former = first
        for operation in operations:
            if operation in self.places:
                self.add(operation, *former)
                former = (operation,)

    def graph(self, groups: Sequence[tuple[int, ...]]) -> OperationGraph:
        """Orders the exchanges.

        Args:
            groups: Places of the operations of each communication.

        Raises:
            TraceError: There is a circle.
        """
        names = [operation.name for operation in self.places]
        messages = {place for group in groups for place in group}
        every = [*groups, *((place,) for place in range(len(names)) if place not in messages)]
        which = {place: number for number, group in enumerate(every) for place in group}
        needs = [
            {which[each] for place in group for each in self.depends.get(place, ())}
            for group in every
        ]
        needed_by: list[list[int]] = [[] for _ in every]
        for number, its in enumerate(needs):
            for each in its:
                needed_by[each].append(number)
        left = [len(its) for its in needs]
        ready = deque(number for number, count in enumerate(left) if not count)
        exchanges = []
        while ready:
            number = ready.popleft()
            group = every[number]
            exchanges.append(
                Exchange(
                    operations=group,
                    depends=tuple(tuple(self.depends.get(place, ())) for place in group),
                    is_message=group[0] in messages,
                    all_replicas=names[group[0]] in _ALL_REPLICAS,
                )
            )
            for each in needed_by[number]:
                left[each] -= 1
                if not left[each]:
                    ready.append(each)
        if len(exchanges) < len(every):
            raise TraceError("operations depend on each other in a circle")
        return OperationGraph(tuple(self.places), tuple(exchanges))


def _add_first_backward(builder: _Builder, computed: list[Recorded], stage: int) -> None:
    """The first backward call is issued after the last but one computation before backward."""
    names = [each.operation.name for each in computed]
    first = names.index(BACKWARD) if BACKWARD in names else 0
    if first >= 2:
        for name in ("backward-recv", "backward-send"):
            builder.add(Operation(name, 0, stage), computed[first - 2].operation)


def _add_parameters(builder: _Builder, computed: list[Recorded], exchanged: list[Recorded]) -> None:
    """The first forward of a model chunk needs the last gather of the chunk's parameters."""
    last = {each.chunk: each for each in exchanged if each.operation.name == PARAMS_GATHER}
    for chunk, gather in last.items():
        forward = [
            each for each in computed if each.operation.name == FORWARD and each.chunk == chunk
        ]
        if forward:
            builder.add(forward[0].operation, gather.operation)


def _add_gradients(builder: _Builder, computed: list[Recorded], exchanged: list[Recorded]) -> None:
    """The first reduce-scatter of a model chunk needs the chunk's last backward."""
    first: dict[int, Recorded] = {}
    for each in exchanged:
        if each.operation.name == GRADS_SCATTER:
            first.setdefault(each.chunk, each)
    for chunk, scatter in first.items():
        backward = [
            each for each in computed if each.operation.name == BACKWARD and each.chunk == chunk
        ]
        if backward:
            builder.add(scatter.operation, max(backward, key=lambda each: each.end).operation)


def _add_update(
    builder: _Builder,
    computed: list[Recorded],
    mine: list[Recorded],
    *,
    overlapped: bool,
    has_embedding: bool,
) -> None:
    """What follows the last computation: reductions of gradients, clipping, the update.

    Args:
        builder: Receives the dependencies.
        computed: The computations of the stage, by start.
        mine: All operations of the stage, by start.
        overlapped: Whether gradients are reduced while backward still runs.
        has_embedding: Whether the stage holds embeddings: the first and the last one do.
    """
    last = max(computed, key=lambda each: each.end).operation
    stage = last.stage
    garbage = Operation(GARBAGE, 0, stage)
    builder.add(garbage, last)
    computation = garbage if garbage in builder.places else last
    scatters = [each.operation for each in mine if each.operation.name == GRADS_SCATTER]
    scatters.sort(key=lambda each: each.number)
    names = [LAYERNORM, *([EMBEDDING] if has_embedding else [])]
    reductions = [Operation(name, 0, stage) for name in names]
    tail = [Operation(CLIP, 0, stage), Operation(OPTIMIZER, 0, stage)]
    if overlapped:
        separate = Operation(GRADS_SEPARATE, 0, stage)
        builder.chain([*reductions, separate, *tail], *scatters[-1:], computation)
    else:
        builder.chain([*reductions, *scatters, *tail], computation)


def _add_calls(builder: _Builder, calls: Iterable[Call]) -> None:
    """Sends follow their computation; receives precede it, and follow the one before it."""
    for operation, computation, _ in calls:
        if computation is None:
            continue
        if PIPELINE[operation.name].is_send:
            builder.add(operation, computation)
        else:
            builder.add(computation, operation)
            builder.add(operation, computation._replace(number=computation.number - 1))


def _groups(builder: _Builder, calls: Iterable[Call], stages: int) -> list[tuple[int, ...]]:
    """The operations of each communication within one replica.

    Raises:
        TraceError: A send or receive has no partner.
    """
    groups: list[tuple[int, ...]] = []
    pairs: dict[tuple[Operation, Operation], list[int]] = {}
    for operation, _, pair in calls:
        place = builder.places[operation]
        if pair is None:
            groups.append((place,))
            continue
        direction = PIPELINE[operation.name]
        mine = Operation(operation.name, pair, operation.stage)
        other = Operation(direction.peer, pair, (operation.stage + direction.to) % stages)
        key = (mine, other) if direction.is_send else (other, mine)
        pairs.setdefault(key, []).append(place)
    for (send, _), members in pairs.items():
        if len(members) != 2:
            raise TraceError(f"a {send.name} of stage {send.stage} has no partner")
        groups.append(tuple(members))
    for operation, place in builder.places.items():
        if operation.name in DATA_PARALLEL:
            groups.append((place,))
    for name in (EMBEDDING, CLIP):
        groups.extend(_across_stages(builder, name, stages))
    return groups


def _across_stages(builder: _Builder, name: str, stages: int) -> list[tuple[int, ...]]:
    """The first operation of a name on all stages, and further ones each on its own."""
    found = [
        (operation, place) for operation, place in builder.places.items() if operation.name == name
    ]
    ends = (0, stages - 1)
    joint = [
        place
        for operation, place in found
        if operation.number == 0 and (name == CLIP or operation.stage in ends)
    ]
    alone = [place for _, place in found if place not in joint]
    return [*([tuple(joint)] if joint else []), *((place,) for place in alone)]


_CLOCKS_DISAGREE_NS: Final = 10_000_000
"""A communication that ends this long before its last participant starts has transfer time 0."""

_SLOWEST_PERCENT: Final = 3
_JOINT_NAMES: Final = {
    name: f"{direction.compute.split('-')[0]}-pp-comm" for name, direction in PIPELINE.items()
}
_CODE: Final = {name: code for code, name in enumerate(OPERATIONS)}


@dataclass(frozen=True)
class NamedSlowdown:
    """How much one type of operation slows the job.

    Attributes:
        name: ``forward-compute`` and so on; all calls of the pipeline in one direction are
            ``forward-pp-comm`` or ``backward-pp-comm``.
        slowdown: S_t: the mean step with the recorded durations of these operations and the ideal
            durations of all others, over the ideal step.
    """

    name: str
    slowdown: float


@dataclass(frozen=True)
class PartSlowdown:
    """How much one data-parallel replica or one pipeline stage slows the job.

    Attributes:
        number: Its number.
        slowdown: The mean step with the recorded durations of its workers and the ideal durations
            of all others, over the ideal step.
    """

    number: int
    slowdown: float


@dataclass(frozen=True)
class WorkerSlowdown:
    """How much one worker slows the job.

    Attributes:
        rank: Its rank.
        replica: Its data-parallel rank.
        stage: Its pipeline stage.
        slowdown: S_w: the smaller one of its replica's and its stage's.
    """

    rank: int
    replica: int
    stage: int
    slowdown: float


@dataclass(frozen=True)
class StepSlowdown:
    """How much stragglers slow one step.

    Attributes:
        step: Its number.
        slowdown: The step over the ideal step, both replayed.
    """

    step: int
    slowdown: float


@dataclass(frozen=True)
class IdealJob:
    """A job compared with the same job without stragglers, as StragglerAnalysis does.

    Both are replayed from the dependencies of the operations, without the gaps in which the host
    is late. In the ideal job, all operations of one type take equally long: the mean duration of
    computations, the median transfer duration of communication. Definitions and symbols: Lin et
    al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.

    Attributes:
        slowdown: S: `replayed_us` over `ideal_us`.
        step_us: Mean of the recorded steps.
        replayed_us: Mean of the replayed steps.
        ideal_us: A step of the ideal job.
        discrepancy: `step_us` over `replayed_us`: far from 1, the replay does not describe the job.
        operations: By type of operation, the largest slowdown first.
        replicas: By data-parallel replica.
        stages: By pipeline stage.
        workers: By worker, the largest slowdown first.
        slowest_ranks: The 3 % of the workers (at least one) with the largest slowdown.
        m_w: M_W: the share of the slowdown that is gone when `slowest_ranks` have ideal durations;
            null if nothing slows the job.
        m_s: M_S: the share that is gone when the last pipeline stage has ideal durations.
        steps: By step.
    """

    slowdown: float
    step_us: float
    replayed_us: float
    ideal_us: float
    discrepancy: float
    operations: tuple[NamedSlowdown, ...]
    replicas: tuple[PartSlowdown, ...]
    stages: tuple[PartSlowdown, ...]
    workers: tuple[WorkerSlowdown, ...]
    slowest_ranks: tuple[int, ...]
    m_w: float | None
    m_s: float | None
    steps: tuple[StepSlowdown, ...]


@dataclass(frozen=True)
class _Worker:
    """The operations of one worker, by step, type and start.

    Attributes:
        rank: Its rank.
        replica: Its data-parallel rank.
        stage: Its pipeline stage.
        step: The step of each operation.
        name: The index of each operation's type in `OPERATIONS`.
        number: The number of each operation within its step and type.
        start: Start, ns.
        end: End, ns.
        chunk: Model chunk.
    """

    rank: int
    replica: int
    stage: int
    step: IntArray
    name: IntArray
    number: IntArray
    start: IntArray
    end: IntArray
    chunk: IntArray


def ideal_job(trace: Trace, steps: IntArray) -> IdealJob | None:
    """Compares a job with the ideal job; notes in the trace why that is not possible.

    Args:
        steps: Numbers of the steps to look at.

    Returns:
        The comparison; None for traces of other formats, and for jobs that the model does not
        describe.
    """
    layout = trace.run.labels.get(WORKERS_LABEL)
    if trace.run.source != "straggler-analysis" or not isinstance(layout, dict):
        return None
    try:
        workers = _workers(trace, layout, steps)
        return _Comparison(workers, trace.notes).result()
    except TraceError as error:
        trace.notes.append(f"the slowdown by stragglers is not known: {error}")
        return None


def _workers(trace: Trace, layout: dict[str, object], steps: IntArray) -> list[_Worker]:
    """The operations of all workers, by replica and stage.

    Raises:
        TraceError: Workers are missing.
    """
    places: dict[tuple[int, int], int] = {}
    for rank in trace.ranks:
        match layout.get(str(rank)):
            case [int(replica), int(stage)]:
                places[replica, stage] = rank
            case _:
                raise TraceError(f"the place of rank {rank} in the job is not recorded")
    replicas, stages = (1 + max(each[axis] for each in places) for axis in (0, 1))
    if len(places) != replicas * stages:
        raise TraceError(
            f"{len(places)} of {replicas * stages} workers are recorded "
            f"({replicas} replicas of {stages} stages)"
        )
    place_of = {rank: at for at, rank in places.items()}
    task, doing = partial(_worker, place_of=place_of, steps=steps), "reading operations of workers"
    found = list(trace.map_ranks(task, doing, list(place_of), one_at_a_time=True))
    return sorted(found, key=lambda each: (each.replica, each.stage))


def _worker(trace: Trace, place_of: Mapping[int, tuple[int, int]], steps: IntArray) -> _Worker:
    """The operations of a trace of one worker."""
    (rank,) = trace.ranks
    at = place_of[rank]
    columns = trace.columns(rank)
    codes = np.array([*(_CODE.get(name, -1) for name in columns.names), -1])[columns.name]
    chunk_of = [
        int(end) if (end := lane.rpartition(CHUNK_MARK)[2]).isdecimal() and len(end) < 8 else 0
        for lane in columns.lanes
    ]
    rows = np.flatnonzero((codes >= 0) & np.isin(columns.step, steps) & (columns.end != NULL_NS))
    rows = rows[np.lexsort((columns.start[rows], codes[rows], columns.step[rows]))]
    step, name = columns.step[rows].astype(np.int64), codes[rows]
    first = changes(step, name)
    place = np.arange(len(rows))
    number = place - np.maximum.accumulate(np.where(first, place, 0)) if len(rows) else place
    return _Worker(
        rank=rank,
        replica=at[0],
        stage=at[1],
        step=step,
        name=name,
        number=number,
        start=columns.start[rows],
        end=columns.end[rows],
        chunk=np.array([*chunk_of, 0])[columns.lane[rows]],
    )


class _Comparison:
    """The recorded and the ideal job."""

    def __init__(self, workers: Sequence[_Worker], notes: list[str]) -> None:
        self._workers = workers
        self._replicas = 1 + max(each.replica for each in workers)
        self._stages = 1 + max(each.stage for each in workers)
        present = [np.unique(each.step) for each in workers]
        self._steps = present[0]
        for each in present[1:]:
            self._steps = np.intersect1d(self._steps, each)
        if not len(self._steps):
            raise TraceError("no step is recorded on all workers")
        graph = find_graph(self._first_replica(), self._stages)
        start, end = self._times(graph, notes)
        self._graph = graph
        self._base = np.asarray(end.max(axis=(0, 2)) - start.min(axis=(0, 2)), np.float64)
        self._actual = _durations(graph, start, end)
        self._ideal = _ideal_durations(graph, self._actual)

    def _first_replica(self) -> list[Recorded]:
        """The operations of the first replica in its first step."""
        found = []
        for worker in self._workers[: self._stages]:
            rows = np.flatnonzero(worker.step == self._steps[0])
            columns = (worker.name, worker.number, worker.start, worker.end, worker.chunk)
            for name, number, start, end, chunk in zip(
                *(column[rows].tolist() for column in columns), strict=True
            ):
                operation = Operation(OPERATIONS[name], number, worker.stage)
                found.append(Recorded(operation, start, end, chunk))
        return found

    def _times(
        self, graph: OperationGraph, notes: list[str]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Start and end of all operations, ns, shape (operations, steps, replicas).

        Only steps in which all replicas have the same operations; others are left out and noted.
        """
        shape = (len(graph.operations), len(self._steps), self._replicas)
        start, end = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        seen = np.zeros(shape, bool)
        whole = np.ones(len(self._steps), bool)
        numbers = 1 + max(int(each.number.max()) for each in self._workers)
        for worker in self._workers:
            places = np.full(len(OPERATIONS) * numbers, -1)
            for place, (name, number, stage) in enumerate(graph.operations):
                if stage == worker.stage:
                    places[_CODE[name] * numbers + number] = place
            place = places[worker.name * numbers + worker.number]
            at = place_in(worker.step, self._steps)
            inside = at != NULL
            whole[at[inside & (place < 0)]] = False
            known = inside & (place >= 0)
            cell = (place[known], at[known], worker.replica)
            start[cell], end[cell], seen[cell] = worker.start[known], worker.end[known], True
        whole &= seen.all(axis=(0, 2))
        if not whole.any():
            raise TraceError("replicas have different operations in every step")
        if not whole.all():
            others = int((~whole).sum())
            notes.append(
                f"{others} of {len(whole)} steps {agreeing(others, 'has')} other operations than "
                "the first one: left out of the slowdown by stragglers"
            )
            self._steps = self._steps[whole]
            return start[:, whole], end[:, whole]
        return start, end

    def result(self) -> IdealJob:
        """All figures."""
        actual = self._graph.replay(self._actual)
        ideal = self._step(self._ideal_everywhere())
        replicas = self._by_replica() / ideal
        stages = [self._with_actual(self._on_stage(each)) / ideal for each in range(self._stages)]
        workers = sorted(
            (
                WorkerSlowdown(
                    each.rank,
                    each.replica,
                    each.stage,
                    min(float(replicas[each.replica]), stages[each.stage]),
                )
                for each in self._workers
            ),
            key=lambda row: (-row.slowdown, row.rank),
        )
        slowest = workers[: -(-len(workers) * _SLOWEST_PERCENT // 100)]
        which = np.zeros((len(self._graph.operations), self._replicas), bool)
        for row in slowest:
            which[self._on_stage(row.stage), row.replica] = True
        last = np.zeros_like(which)
        last[self._on_stage(self._stages - 1)] = True
        base, replayed = float(self._base.mean()), float(actual.mean())
        return IdealJob(
            slowdown=replayed / ideal,
            step_us=base / 1e3,
            replayed_us=replayed / 1e3,
            ideal_us=ideal / 1e3,
            discrepancy=base / replayed,
            operations=self._by_name(ideal),
            replicas=tuple(
                PartSlowdown(number, value) for number, value in enumerate(replicas.tolist())
            ),
            stages=tuple(PartSlowdown(number, value) for number, value in enumerate(stages)),
            workers=tuple(workers),
            slowest_ranks=tuple(row.rank for row in slowest),
            m_w=self._share_gone(which, replayed, ideal),
            m_s=self._share_gone(last, replayed, ideal),
            steps=tuple(
                StepSlowdown(step, value)
                for step, value in zip(self._steps.tolist(), (actual / ideal).tolist(), strict=True)
            ),
        )

    def _ideal_everywhere(self) -> FloatArray:
        return np.broadcast_to(self._ideal[:, None, None], self._actual.shape)

    def _step(self, durations: FloatArray) -> float:
        """The mean step with given durations, ns."""
        return float(self._graph.replay(durations).mean())

    def _with_actual(self, operations: npt.NDArray[np.bool_]) -> float:
        """The mean step in which only some operations have their recorded durations, ns."""
        chosen = operations[:, None, None]
        return self._step(np.where(chosen, self._actual, self._ideal_everywhere()))

    def _on_stage(self, stage: int) -> npt.NDArray[np.bool_]:
        return np.array([each.stage == stage for each in self._graph.operations])

    def _by_replica(self) -> FloatArray:
        """The mean step in which only one replica has its recorded durations, for each, ns."""
        operations = len(self._graph.operations)
        lanes = [self._actual.reshape(operations, -1)]
        if self._replicas > 1:
            lanes.append(np.broadcast_to(self._ideal[:, None], lanes[0].shape))
        times = self._graph.replay(np.stack(lanes, axis=2))
        return np.asarray(times.reshape(-1, self._replicas).mean(axis=0))

    def _by_name(self, ideal: float) -> tuple[NamedSlowdown, ...]:
        names = np.array(
            [_JOINT_NAMES.get(each.name, each.name) for each in self._graph.operations]
        )
        found = [
            NamedSlowdown(name, self._with_actual(names == name) / ideal)
            for name in np.unique(names).tolist()
        ]
        return tuple(sorted(found, key=lambda row: (-row.slowdown, row.name)))

    def _share_gone(
        self, ideal_ones: npt.NDArray[np.bool_], replayed: float, ideal: float
    ) -> float | None:
        """How much of the slowdown is gone when some operations have ideal durations.

        Args:
            ideal_ones: Which have, shape (operations, replicas).
            replayed: The mean replayed step, ns.
            ideal: The ideal step, ns.
        """
        if replayed <= ideal:
            return None
        durations = np.where(ideal_ones[:, None], self._ideal_everywhere(), self._actual)
        return (replayed - self._step(durations)) / (replayed - ideal)


def _durations(
    graph: OperationGraph, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
) -> FloatArray:
    """Durations of computations and transfer durations of communication, ns."""
    found = np.asarray(end - start, np.float64)
    for exchange in graph.exchanges:
        if not exchange.is_message:
            continue
        places = list(exchange.operations)
        latest = start[places].max(axis=0)
        if exchange.all_replicas:
            latest = np.broadcast_to(latest.max(axis=1, keepdims=True), latest.shape)
        transfer = end[places] - latest
        found[places] = np.where(transfer <= -_CLOCKS_DISAGREE_NS, 0, transfer)
    return found


def _ideal_durations(graph: OperationGraph, actual: FloatArray) -> FloatArray:
    """The duration that all operations of a type have in the ideal job, for each operation, ns."""
    names = np.array([each.name for each in graph.operations])
    found = np.zeros(len(names))
    for name in np.unique(names).tolist():
        mine = names == name
        is_message = name in COLLECTIVES or name in PIPELINE
        values = actual[mine]
        found[mine] = np.median(values) if is_message else values.mean()
    return found


IDEAL_JOB: Final = derived("ideal_job", lambda whole: ideal_job(whole.trace, whole.steps.number))
