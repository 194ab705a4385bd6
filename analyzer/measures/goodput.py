"""What a job's time goes to, over all its attempts: steps, and what is not a step.

Each moment from the launcher's start to its end counts for one part, the first of these that
holds:

1. `start`: no rank has begun a step yet.
2. `restart`: an attempt has failed, and no rank of the next one has begun a step; or a step is
   executed again that an earlier attempt had completed.
3. `hang`: no rank of an attempt that failed, or that still runs, has recorded anything since, and
   the tracer has noticed the silence of each.
4. `checkpoint`: a rank saves a checkpoint, or loads one that this job has saved, in the thread that
   trains.
5. `evaluation`: a rank evaluates.
6. `training`: a rank is in a step that it completes.
7. `unrecorded`: recording is switched off on a rank, or leaves out a step.
8. `other`: the rest, such as the last step of a process that died in it, and the end of the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ddltrace.analyzer.events.event_columns import ColumnTable, IntArray
from ddltrace.analyzer.events.interval_sets import Spans, length, subtract, union
from ddltrace.analyzer.events.rank_scan import Region
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, Whole, merged_by
from ddltrace.analyzer.measures.process_ends import end_of_job, start_of_job
from ddltrace.analyzer.trace.step_selection import RULE, RULE_ASKED
from ddltrace.tracer.trace.schema import (
    CHECKPOINT_FILE,
    CHECKPOINT_LOAD,
    CHECKPOINT_SAVE,
    CHECKPOINT_WRITE,
    EVALUATION,
)

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace
    from ddltrace.tracer.trace.run_info import RankInfo

_NEVER: Final = 1 << 62
_SAVES: Final = (CHECKPOINT_SAVE, CHECKPOINT_WRITE)


@dataclass(frozen=True)
class GoodputShares:
    """Shares of the job's time; they sum to 1, null counted as 0.

    A moment counts for the first of `start`, `restart`, `hang`, `checkpoint`, `evaluation`,
    `training` and `unrecorded` that holds on any rank.

    Attributes:
        start: Until the first step begins.
        training: Steps, without what is named here.
        checkpoint: Checkpoints that training waits for; null if they were not recorded.
        evaluation: Evaluations; null if they were not recorded.
        restart: From the failure of an attempt to the first step of the next one, and steps that
            are executed again, where `lost_steps` is known.
        hang: Silences of all ranks that lasted until the end of their attempt; null if the trace is
            not ddltrace's.
        unrecorded: Recording was switched off, or left out a step.
        other: The rest, such as the end of the job.
    """

    start: float
    training: float
    checkpoint: float | None
    evaluation: float | None
    restart: float
    hang: float | None
    unrecorded: float
    other: float


@dataclass(frozen=True)
class Goodput:
    """What the job's time went to, over all its attempts.

    Attributes:
        wall_us: Time of the job.
        whole_job: Whether it runs from the start of the launcher to its end, or to now; otherwise
            from the first event or to the last one.
        shares: What it went to.
        restarts: How often the job was started again.
        lost_steps: Steps that were executed again after a restart; null if it is not known which
            checkpoint an attempt began from.
    """

    wall_us: float
    whole_job: bool
    shares: GoodputShares
    restarts: int
    lost_steps: int | None


class _Found(NamedTuple):
    """What was found in steps.

    Attributes:
        first: The earliest time of any event.
        last: The latest.
        regions: Checkpoints and evaluations.
        updated: The last step of each attempt that was updated, though perhaps not recorded: a step
            is recorded when the next one begins.
    """

    first: int
    last: int
    regions: frozenset[Region]
    updated: dict[int, int]


@dataclass(frozen=True)
class _Steps(ColumnTable):
    """Steps of the ranks of one attempt, in the order of ranks and steps.

    Attributes:
        rank: The rank.
        number: Number of the step in the attempt, from 0.
        start: Its start.
        end: Its end.
    """

    rank: IntArray
    number: IntArray
    start: IntArray
    end: IntArray


class _Attempt(NamedTuple):
    """One start of the job.

    Attributes:
        infos: Its processes.
        began: When the first process began to record.
        ended: When the first process that failed ended; without one, the end of the job.
        steps: Its steps.
        first: When its first step began, or recording that was off from the beginning on might have
            missed it; its end without steps.
    """

    infos: Sequence[RankInfo]
    began: int
    ended: int
    steps: _Steps
    first: int


def _goodput(whole: Whole) -> Goodput | None:
    trace, run = whole.trace, whole.trace.run
    if not len(whole.steps) or whole.steps.rule in {RULE, RULE_ASKED}:
        return None
    found = whole.found.of(GOODPUT)
    created, ended = start_of_job(trace), end_of_job(trace)
    begin = found.first if created is None else min(created, found.first)
    end = found.last if ended is None else max(ended, found.last)
    attempts = _attempts(whole, begin, end)
    redone, regions = _redone(trace, attempts, found), found.regions
    parts = {
        "start": spans_of([(begin, attempts[0].first)]),
        "restart": spans_of(_restarts(attempts, redone)),
        "hang": spans_of(_silences(trace, attempts)),
        "checkpoint": spans_of(_checkpoints(regions)),
        "evaluation": spans_of((one.start, one.end) for one in regions if one.name == EVALUATION),
        "training": union(*(np.concatenate(times) for times in _times(attempts))),
        "unrecorded": spans_of(_unrecorded(trace, attempts)),
    }
    shares: dict[str, Any] = shares_of(begin, end, parts)
    unknown = {} if run.source == "ddltrace" else {"hang": None}
    if not all(info.checkpoints for info in run.ranks):
        unknown |= {"checkpoint": None, "evaluation": None}
    return Goodput(
        wall_us=(end - begin) / 1e3,
        whole_job=created is not None and ended is not None,
        shares=GoodputShares(**(shares | unknown)),
        restarts=len(attempts) - 1,
        lost_steps=None if None in redone else sum(filter(None, redone)),
    )


def shares_of(begin: int, end: int, parts: Mapping[str, Spans]) -> dict[str, float]:
    """Shares of a job's time by parts, and of the rest.

    Args:
        begin: When the job began.
        end: When it ended, later than that.
        parts: Part -> when it holds; a moment counts for the first part that does.
    """
    rest, shares = spans_of([(begin, end)]), {}
    for name, spans in parts.items():
        left = subtract(rest, spans)
        shares[name] = (length(rest) - length(left)) / (end - begin)
        rest = left
    return {**shares, "other": length(rest) / (end - begin)}


def spans_of(intervals: Iterable[tuple[int, int]]) -> Spans:
    """The instants in any of some intervals."""
    times = np.array(list(intervals), np.int64).reshape(-1, 2)
    return union(times[:, 0], times[:, 1])


def _times(attempts: Sequence[_Attempt]) -> tuple[list[IntArray], list[IntArray]]:
    """Starts and ends of all steps."""
    return [each.steps.start for each in attempts], [each.steps.end for each in attempts]


def _attempts(whole: Whole, begin: int, end: int) -> list[_Attempt]:
    """The attempts of a job, in order."""
    trace, columns = whole.trace, whole.rank_steps
    step, start = columns["step"].astype(np.int64), columns["start_ns"].astype(np.int64)
    wall = columns["wall_ns"].astype(np.int64)
    every = _Steps(columns["rank"].astype(np.int64), step, start, start + wall)
    of_step = trace.generations_of(step)
    infos: dict[int, list[RankInfo]] = {}
    for info in trace.run.ranks:
        infos.setdefault(trace.generation(info), []).append(info)
    attempts = []
    for generation, processes in sorted(infos.items()):
        steps = every.keep(np.flatnonzero(of_step == generation))
        steps = replace(steps, number=steps.number - trace.first_step(processes[0]))
        began = min((_began(trace, info, begin) for info in processes), default=begin)
        failed = [_ended(trace, info) for info in processes if info.exit_status != 0]
        known = [moment for moment in failed if moment is not None]
        is_last = generation == max(infos)
        ended = end if is_last else int(steps.end.max(initial=began))
        ended = min(known, default=ended)
        if (steps.number == 0).any():
            first = int(steps.start[steps.number == 0].min())
        elif len(steps.number) or any(info.is_off for info in processes):
            first = began
        else:
            first = ended
        attempts.append(_Attempt(processes, began, ended, steps, first))
    return attempts


def _began(trace: Trace, info: RankInfo, default: int) -> int:
    """When a process began to record."""
    ns = info.clock.get("monotonic_ns")
    return trace.moment(info, ns) if isinstance(ns, int) else default


def _ended(trace: Trace, info: RankInfo) -> int | None:
    """When a process ended, if that was observed."""
    return None if info.ended_ns is None else trace.moment(info, info.ended_ns)


def _restarts(
    attempts: Sequence[_Attempt], redone: Sequence[int | None]
) -> Iterator[tuple[int, int]]:
    for former, later in pairwise(attempts):
        yield former.ended, later.first
    for attempt, number in zip(attempts, redone, strict=True):
        again = attempt.steps.keep(np.flatnonzero(attempt.steps.number < (number or 0)))
        yield from zip(again.start.tolist(), again.end.tolist(), strict=True)


def _silences(trace: Trace, attempts: Sequence[_Attempt]) -> Iterator[tuple[int, int]]:
    """Silences of all ranks in which an attempt has failed, or which go on."""
    run = trace.run
    for attempt in attempts:
        goes_on = attempt is attempts[-1] and run.status == "running"
        failed = any(info.exit_status or info.status == "killed" for info in attempt.infos)
        if not goes_on and not failed:
            continue
        since = [_silent_since(trace, info, attempt.steps) for info in attempt.infos]
        known = [moment for moment in since if moment is not None]
        if len(known) == len(since):
            yield max(known), attempt.ended


def _silent_since(trace: Trace, info: RankInfo, steps: _Steps) -> int | None:
    """Since when a process has recorded nothing; None if it has, or if nobody noticed."""
    if info.silence is None:
        return None
    noticed_ns = info.silence["noticed_ns"]
    noticed = trace.moment(info, noticed_ns)
    if (steps.start[steps.rank == info.rank] > noticed).any():
        return None
    for batch in trace.read_columns(info, ("start_ns",)):
        if (batch["start_ns"].to_numpy() > noticed_ns).any():
            return None
    return trace.moment(info, info.silence["since_ns"])


def _checkpoints(regions: Iterable[Region]) -> Iterator[tuple[int, int]]:
    """Checkpoints that training waits for."""
    saved = {_file(each) for each in regions if each.name.startswith(_SAVES)} - {""}
    for each in regions:
        loads_own = each.name.startswith(CHECKPOINT_LOAD) and _file(each) in saved
        if each.leads and (loads_own or each.name.startswith(CHECKPOINT_SAVE)):
            yield each.start, each.end


def _file(region: Region) -> str:
    """What identifies the file of a checkpoint; empty if that is not known."""
    return region.name.partition(CHECKPOINT_FILE)[2]


def _unrecorded(trace: Trace, attempts: Sequence[_Attempt]) -> Iterator[tuple[int, int]]:
    """Times in which a rank has left out steps."""
    for attempt in attempts:
        for info in attempt.infos:
            ended = _ended(trace, info)
            ended = attempt.ended if ended is None else ended
            steps = attempt.steps.keep(np.flatnonzero(attempt.steps.rank == info.rank))
            # What precedes the first step is a gap if that is not the attempt's first one.
            number = np.append(-1, steps.number)
            last = np.append(_began(trace, info, attempt.first), steps.end)
            gaps = np.flatnonzero(np.diff(number) > 1)
            yield from zip(last[gaps].tolist(), steps.start[gaps].tolist(), strict=True)
            if info.is_off:
                yield int(last[-1]), ended


def _redone(trace: Trace, attempts: Sequence[_Attempt], found: _Found) -> list[int | None]:
    """How many of the first steps of each attempt an earlier one had completed.

    A step of the job is the attempt's first one, which the checkpoint says that it begins from,
    and the number of the step in the attempt. The file says which checkpoint that is: the last one
    that was saved in it.
    """
    saved: dict[str, int] = {}
    redone: list[int | None] = []
    furthest = 0
    for number, attempt in enumerate(attempts):
        offset, base = trace.first_step(attempt.infos[0]), 0
        updated = found.updated.get(number, offset - 1) - offset
        count = int(attempt.steps.number.max(initial=updated)) + 1
        if number and count:
            loaded = {file for info in attempt.infos for file in _loaded(trace, info)}
            known = [saved[file] for file in loaded & saved.keys() if file]
            if not known:  # the checkpoint is another job's, or was not saved by PyTorch
                return redone + [None] * (len(attempts) - number)
            base = max(known)
        redone.append(min(furthest, base + count) - base)
        furthest = max(furthest, base + count)
        until = attempts[number + 1].began if number + 1 < len(attempts) else _NEVER
        for region in sorted(found.regions, key=lambda one: one.end):
            if region.name.startswith(_SAVES) and attempt.began <= region.start < until:
                saved[_file(region)] = base + max(0, region.step - offset)
    return redone


def _loaded(trace: Trace, info: RankInfo) -> Iterator[str]:
    """The files of checkpoints that a process loads before its first step."""
    for batch in trace.read_columns(info, ("kind", "name", "step")):
        steps = batch["step"].is_valid().to_numpy(zero_copy_only=False)
        until = int(steps.argmax()) if steps.any() else len(steps)
        first = batch.slice(0, until)
        markers = first.filter(pc.equal(first["kind"], "marker"))
        for name in markers["name"].to_pylist():
            what, _, file = (name or "").partition(CHECKPOINT_FILE)
            if what == CHECKPOINT_LOAD:
                yield file
        if until < len(steps):
            return


def _found(joined: JoinedSteps) -> _Found:
    scans = [scan for scan in joined.scans.values() if scan.events]
    updated: dict[int, int] = {}
    for scan in scans:
        generation = joined.trace.generations_of(scan.updated).tolist()
        for number, step in zip(generation, scan.updated.tolist(), strict=True):
            updated[number] = max(step, updated.get(number, step))
    return _Found(
        min((scan.first for scan in scans), default=_NEVER),
        max((scan.last for scan in scans), default=-_NEVER),
        frozenset(region for scan in scans for region in scan.regions),
        updated,
    )


def _both(former: _Found, later: _Found) -> _Found:
    return _Found(
        min(former.first, later.first),
        max(former.last, later.last),
        former.regions | later.regions,
        {
            number: max(each.updated[number] for each in (former, later) if number in each.updated)
            for number in former.updated | later.updated
        },
    )


GOODPUT: Final[Measure[_Found, Goodput | None]] = Measure(
    "goodput", _goodput, _found, merged_by(_both), of="all", rows=Goodput
)
