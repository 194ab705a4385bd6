"""Pipelines of stages that exchange microbatches, and the bubbles of each stage.

A pipeline is identified by its sends: its ranks form a chain, and the first rank sends before it
receives. Receives from the previous stage belong to forward, receives from the next stage to
backward. Consecutive receives from one side without own work between them belong to one
microbatch; microbatches are numbered from 0 in each step. The *bubble* of a microbatch on a stage
is the time in which the stage is blocked on these receives: it waits for the other stage, or for
the transfer.

Rings are not pipelines. Neither are interleaved schedules, which have several stages on one rank,
because their last rank sends to the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, NULL_NS, FloatArray, IntArray, changes
from ddltrace.analyzer.events.interval_sets import lengths_within
from ddltrace.analyzer.events.own_work import own_work
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.dependencies import Graph
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, merged_together
from ddltrace.analyzer.measures.steps import in_steps


@dataclass(frozen=True)
class PipelineStage:
    """One stage of a pipeline, means per steady step.

    Attributes:
        rank: The rank of the stage.
        stage: Its index in the pipeline, from 0.
        step_us: Duration of the rank's step.
        work_us: Time of its computations.
        bubble_us: Time for which it is blocked on receives from its neighbours: the sum of the next
            two values, and of `forward_us` and `backward_us`.
        waiting_us: The part until the neighbour sends.
        transfer_us: The part from the send to the arrival.
        forward_us: The bubble of each microbatch at the receive from the stage before it; empty
            for the first stage.
        backward_us: The same at the receive from the stage after it; empty for the last stage.
    """

    rank: int
    stage: int
    step_us: float
    work_us: float
    bubble_us: float
    waiting_us: float
    transfer_us: float
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """Ranks that pass microbatches on to each other in a chain, over the steady steps.

    Attributes:
        ranks: In the order of the stages.
        microbatches: Number of microbatches in a step.
        bubble_share: Sum of the stages' bubbles over the sum of their steps.
        ideal_share: The same share with equal stages and no transfers: (p - 1) / (m + p - 1) for p
            stages and m microbatches (GPipe and 1F1B).
        stages: By stage.
    """

    ranks: tuple[int, ...]
    microbatches: int
    bubble_share: float
    ideal_share: float
    stages: tuple[PipelineStage, ...]


def _pipelines(steps: JoinedSteps) -> tuple[Pipeline, ...]:
    """The pipelines of a job, by their first rank; means are over the steady steps."""
    joined, steady = steps.joined, steps.steady
    messages = joined.messages
    rows = np.flatnonzero(
        messages.is_p2p & (joined.partner != NULL) & in_steps(messages.step, steady)
    )
    if not len(rows):
        return ()
    blocked = _blocked(joined, steps.graph)
    found = []
    for chain in _chains(joined, rows):
        stages = tuple(
            _stage(steps.scans[rank], joined, blocked, steady, (chain, place))
            for place, rank in enumerate(chain)
        )
        count = max(max(len(stage.forward_us), len(stage.backward_us)) for stage in stages)
        step = sum(stage.step_us for stage in stages)
        found.append(
            Pipeline(
                ranks=tuple(chain),
                microbatches=count,
                bubble_share=sum(stage.bubble_us for stage in stages) / step if step else 0.0,
                ideal_share=(len(chain) - 1) / (count + len(chain) - 1),
                stages=stages,
            )
        )
    return tuple(found)


def _blocked(joined: Joined, graph: Graph) -> tuple[IntArray, IntArray]:
    """How long ranks are blocked on each message: waiting for another rank, and in transfer."""
    blocks = graph.blocks
    waiting = np.zeros(len(joined.messages), dtype=np.int64)
    moving = np.zeros(len(joined.messages), dtype=np.int64)
    known = np.flatnonzero(blocks.message != NULL)
    row = blocks.message[known]
    start, end, released = blocks.start[known], blocks.end[known], joined.released[row]
    came = np.where(released == NULL_NS, end, np.clip(released, start, end))
    np.add.at(waiting, row, came - start)
    np.add.at(moving, row, end - came)
    return waiting, moving


def _chains(joined: Joined, rows: IntArray) -> list[list[int]]:
    """The ranks of each pipeline in the order of its stages."""
    messages = joined.messages
    neighbours: dict[int, set[int]] = defaultdict(set)
    pairs = np.unique(np.stack([messages.rank[rows], messages.peer[rows]]), axis=1)
    for rank, peer in pairs.T.tolist():
        if rank != peer:
            neighbours[rank].add(peer)
            neighbours[peer].add(rank)
    sends = messages.op_is("send")
    ranks, first = np.unique(messages.rank[rows], return_index=True)
    sends_first = dict(zip(ranks.tolist(), sends[rows[first]].tolist(), strict=True))
    chains = []
    for rank in sorted(neighbours):
        if len(neighbours[rank]) != 1 or not sends_first.get(rank, False):
            continue
        chain = [rank]
        while True:
            following = neighbours[chain[-1]] - set(chain[-2:])
            if len(following) != 1:
                break
            chain += following
        whole = not following and all(len(neighbours[each]) <= 2 for each in chain)
        if whole and len(chain) > 1 and not sends_first.get(chain[-1], True):
            chains.append(chain)
    return chains


def _stage(
    scan: RankScan,
    joined: Joined,
    blocked: tuple[IntArray, IntArray],
    steady: IntArray,
    place: tuple[list[int], int],
) -> PipelineStage:
    """One stage, means per steady step.

    Args:
        joined: All messages.
        blocked: How long ranks wait for, and are in transfer of, each message.
        steady: Numbers of the steady steps.
        place: The ranks of the pipeline, and which of them it is.
    """
    chain, stage = place
    mine = in_steps(scan.step, steady)
    steps = max(int(mine.sum()), 1)
    start, end = scan.step_start[mine], scan.step_end[mine]
    work = own_work(scan)
    sides = []
    for neighbour in (stage - 1, stage + 1):
        inside = 0 <= neighbour < len(chain)
        rows = _receives(joined, scan.rank, chain[neighbour], steady) if inside else None
        sides.append(
            np.zeros((2, 0)) if rows is None else _by_microbatch(scan, joined, rows, blocked)
        )
    forward, backward = (side / steps / 1e3 for side in sides)
    return PipelineStage(
        rank=scan.rank,
        stage=stage,
        step_us=float((end - start).sum()) / steps / 1e3,
        work_us=float(lengths_within(work["compute"], start, end).sum()) / steps / 1e3,
        bubble_us=float(forward.sum() + backward.sum()),
        waiting_us=float(forward[0].sum() + backward[0].sum()),
        transfer_us=float(forward[1].sum() + backward[1].sum()),
        forward_us=tuple(forward.sum(axis=0).tolist()),
        backward_us=tuple(backward.sum(axis=0).tolist()),
    )


def _receives(joined: Joined, rank: int, peer: int, steady: IntArray) -> IntArray:
    """Returns the rows of a rank's receives from another in the steady steps, sorted by end."""
    messages, own = joined.messages, joined.rows(rank)
    rows = np.arange(own.start, own.stop)
    rows = rows[messages.op_is("recv")[own] & (messages.peer[own] == peer)]
    rows = rows[in_steps(messages.step[rows], steady) & (messages.end[rows] != NULL_NS)]
    return np.asarray(rows[np.argsort(messages.end[rows], kind="stable")])


def _by_microbatch(
    scan: RankScan, joined: Joined, rows: IntArray, blocked: tuple[IntArray, IntArray]
) -> FloatArray:
    """Waiting and transfer of each microbatch, summed over steps, ns: shape (2, microbatches)."""
    messages = joined.messages
    end, step = messages.end[rows], messages.step[rows]
    if not len(rows):
        return np.zeros((2, 0))
    work = own_work(scan)["compute"]
    worked = lengths_within(work, end[:-1], end[1:]) > 0
    new_step = changes(step)
    new = new_step | np.append(True, worked)
    number = np.cumsum(new) - 1
    begins = np.maximum.accumulate(np.where(new_step, number, 0))
    which = number - begins
    return np.stack(
        [np.bincount(which, weights=times[rows]).astype(np.float64) for times in blocked]
    )


def _merged(parts: Sequence[tuple[float, tuple[Pipeline, ...]]]) -> tuple[Pipeline, ...]:
    """Means per step over the ranges in which each pipeline was found."""
    found: dict[tuple[int, ...], list[tuple[float, Pipeline]]] = defaultdict(list)
    for weight, pipelines_of_range in parts:
        for pipeline in pipelines_of_range:
            found[pipeline.ranks].append((weight, pipeline))
    return tuple(_merged_pipeline(found[ranks]) for ranks in sorted(found))


def _merged_pipeline(parts: Sequence[tuple[float, Pipeline]]) -> Pipeline:
    """One pipeline, over the steps of the ranges in which it was found."""
    stages = tuple(
        _merged_stage([(weight, pipeline.stages[place]) for weight, pipeline in parts])
        for place in range(len(parts[0][1].ranks))
    )
    count = max(pipeline.microbatches for _, pipeline in parts)
    step = sum(stage.step_us for stage in stages)
    return Pipeline(
        ranks=parts[0][1].ranks,
        microbatches=count,
        bubble_share=sum(stage.bubble_us for stage in stages) / step if step else 0.0,
        ideal_share=(len(stages) - 1) / (count + len(stages) - 1),
        stages=stages,
    )


def _merged_stage(parts: Sequence[tuple[float, PipelineStage]]) -> PipelineStage:
    weights = [weight for weight, _ in parts]

    def mean(values: list[Any]) -> Any:
        if not isinstance(values[0], tuple):
            return float(np.average(values, weights=weights))
        width = max(map(len, values))
        padded = [np.pad(np.array(each), (0, width - len(each))) for each in values]
        return tuple(np.average(padded, axis=0, weights=weights).tolist()) if width else ()

    times = [field.name for field in fields(PipelineStage) if field.name.endswith("_us")]
    first = parts[0][1]
    return replace(
        first, **{name: mean([getattr(stage, name) for _, stage in parts]) for name in times}
    )


PIPELINES: Final[Measure[tuple[Pipeline, ...], tuple[Pipeline, ...]]] = Measure(
    "pipelines",
    lambda whole: whole.found.of(PIPELINES),
    _pipelines,
    merged_together(_merged),
    of="steady",
)
