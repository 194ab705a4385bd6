"""Replays the operations of a StragglerAnalysis trace with other durations.

The model is that of Lin et al., "Understanding Stragglers in Large Model Training Using What-if
Analysis", OSDI 2025, section 3: an operation starts when the last operation that it depends on has
ended; a computation ends after its duration; a communication ends after its *transfer duration*,
counted from when the last of its participants has started. All steps and replicas have the same
dependencies, so one walk over the operations replays all of them at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.importers.straggler_analysis.operations import (
    BACKWARD,
    CLIP,
    COMPUTE,
    DATA_PARALLEL,
    EMBEDDING,
    FORWARD,
    GARBAGE,
    GRADS_SCATTER,
    GRADS_SEPARATE,
    LAYERNORM,
    OPTIMIZER,
    PARAMS_GATHER,
    PIPELINE,
    Call,
    Operation,
    Recorded,
    by_start,
    match_calls,
)
from ddltrace.tracer.errors import TraceError

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
