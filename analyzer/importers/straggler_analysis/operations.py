"""The operations in a StragglerAnalysis trace, and which computation each send or receive serves.

The format is of Megatron-LM's training loop: https://github.com/ByteDance-Seed/StragglerAnalysis,
described in Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
OSDI 2025, arXiv 2505.05713. A worker is one pipeline stage of one data-parallel replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ddltrace.tracer.errors import TraceError

FORWARD: Final = "forward-compute"
BACKWARD: Final = "backward-compute"
PARAMS_GATHER: Final = "params-all-gather"
GRADS_SCATTER: Final = "grads-reduce-scatter"
GRADS_SEPARATE: Final = "separate-grads-all-reduce"
LAYERNORM: Final = "layernorm-grads-all-reduce"
EMBEDDING: Final = "embedding-grads-all-reduce"
CLIP: Final = "optimizer-clip-main-grad"
OPTIMIZER: Final = "optimizer"
GARBAGE: Final = "gc"

COMPUTE: Final = (FORWARD, BACKWARD)
DATA_PARALLEL: Final = (PARAMS_GATHER, GRADS_SCATTER, GRADS_SEPARATE)

WORKERS_LABEL: Final = "workers"
"""The entry of a run's labels with each worker: rank -> data-parallel rank, pipeline stage."""

CHUNK_MARK: Final = "/chunk-"
"""Stands before the number of the model chunk in a lane, except for chunk 0."""

CLOCK_ERROR_NS: Final = 50_000
"""Tolerance when a send or receive is compared with a computation."""


class Direction(NamedTuple):
    """One of the four kinds of calls between stages.

    Attributes:
        compute: The computation that needs it, or that it sends the result of.
        is_send: Whether it sends.
        to: The peer's stage relative to this one.
        peer: Name of the operation at the other side.
    """

    compute: str
    is_send: bool
    to: int
    peer: str


PIPELINE: Final[Mapping[str, Direction]] = {
    "forward-send": Direction(FORWARD, True, 1, "forward-recv"),
    "forward-recv": Direction(FORWARD, False, -1, "forward-send"),
    "backward-send": Direction(BACKWARD, True, -1, "backward-recv"),
    "backward-recv": Direction(BACKWARD, False, 1, "backward-send"),
}

COLLECTIVES: Final[Mapping[str, str]] = {
    PARAMS_GATHER: "all_gather",
    GRADS_SCATTER: "reduce_scatter",
    GRADS_SEPARATE: "all_reduce",
    LAYERNORM: "all_reduce",
    EMBEDDING: "all_reduce",
    CLIP: "all_reduce",
}
"""Operation -> its name in ``torch.distributed``."""

OPERATIONS: Final = (*COMPUTE, *PIPELINE, *COLLECTIVES, OPTIMIZER, GARBAGE)


class Operation(NamedTuple):
    """One operation of a step, the same in all steps and replicas.

    Attributes:
        name: One of `OPERATIONS`.
        number: Its number among those of the same name in a step of a worker, from 0, by start.
        stage: The worker's pipeline stage.
    """

    name: str
    number: int
    stage: int


@dataclass(frozen=True)
class Recorded:
    """When one operation ran, ns, and the model chunk that it belongs to (-1: none)."""

    operation: Operation
    start: int
    end: int
    chunk: int = -1


class Call(NamedTuple):
    """A send or receive in the pipeline.

    Attributes:
        operation: The call.
        computation: Consumes what it receives, or produces what it sends; None if there is none.
        pair: Its number among the calls of its name and stage that move data; None for a call
            that the recorder notes but that moves nothing, at either end of the model.
    """

    operation: Operation
    computation: Operation | None
    pair: int | None


def by_start(recorded: Iterable[Recorded]) -> list[Recorded]:
    """The operations in the order in which they started."""
    return sorted(recorded, key=lambda each: (each.start, each.operation.number, each.operation))


def match_calls(recorded: Sequence[Recorded], stages: int) -> list[Call]:
    """Finds the computation and the partner of every send and receive of one replica in one step.

    Each forward and backward computation receives once before it starts and sends once after it
    ends. At both ends of a pipeline with several model chunks per stage, the recorder also notes
    calls that move nothing.

    Args:
        recorded: The operations of one replica in one step.
        stages: Number of pipeline stages.

    Raises:
        TraceError: A stage has more or fewer calls than computations to match them with.
    """
    chunks = 1 + max((each.chunk for each in recorded), default=0)
    calls = []
    for stage in range(stages):
        mine = [each for each in recorded if each.operation.stage == stage]
        for name, direction in PIPELINE.items():
            found = by_start(each for each in mine if each.operation.name == name)
            computed = [each for each in mine if each.operation.name == direction.compute]
            calls += _matched(found, computed, direction, stages, chunks)
    return calls


def _matched(
    calls: list[Recorded],
    computed: list[Recorded],
    direction: Direction,
    stages: int,
    chunks: int,
) -> list[Call]:
    """The calls of one kind on one stage with their computations."""
    if not calls:
        return []
    if not computed:
        return [Call(each.operation, None, None) for each in calls]
    by_number = {each.operation.number: each for each in computed}
    last_start = max(each.start for each in computed)
    first_end = min(each.end for each in computed)
    useful = [
        each.end >= first_end - CLOCK_ERROR_NS
        if direction.is_send
        else each.start <= last_start + CLOCK_ERROR_NS
        for each in calls
    ]
    missing = len(computed) - sum(useful)
    if missing not in (0, 1, len(computed)):
        name = calls[0].operation
        raise TraceError(
            f"stage {name.stage} has {sum(useful)} {name.name} for {len(computed)} computations"
        )
    # The first receive of a step may be missing: its computation has no call then.
    number = 1 if missing == 1 and not direction.is_send else 0
    pair = 0
    found = []
    for each, is_useful in zip(calls, useful, strict=True):
        if not is_useful or number not in by_number:
            found.append(Call(each.operation, None, None))
            continue
        computation = by_number[number]
        number += 1
        place = max(computation.chunk, 0) * stages + computation.operation.stage
        moves = 0 <= place + direction.to < stages * chunks
        found.append(Call(each.operation, computation.operation, pair if moves else None))
        pair += moves
    return found
