"""Merges the measures of the steady steps of ranges, see `merge`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import FloatArray
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.measures.dimensions import DimensionTimes, merged_dimensions
from ddltrace.analyzer.measures.job_facts import Exchange, JobFacts
from ddltrace.analyzer.measures.measured import Measured, SteadyMeasures
from ddltrace.analyzer.measures.path_parts import PathPart, PathRank
from ddltrace.analyzer.measures.pipelines import Pipeline, PipelineStage
from ddltrace.analyzer.measures.root_causes import RankWaiting, RootCause, Waiting, known_or_range
from ddltrace.analyzer.measures.savings import Savings
from ddltrace.analyzer.measures.stragglers import Lateness, RankLateness
from ddltrace.analyzer.measures.tensors import MAX_PERIODS, TensorRow, TensorTimes, sorted_rows
from ddltrace.analyzer.step_ranges.keyed_sums import KeyedSums

_TENSOR_TIMES: Final = (
    *("ready_us", "enqueue_us", "start_us", "complete_us", "waited_us", "updated_us", "bucket"),
)
_SAVINGS: Final = tuple(field.name for field in fields(Savings))
_MOST_UNKNOWN: Final = 0.5
"""A saving is unknown if it was not found for more than this part of the steps."""


class _Saving(NamedTuple):
    """What is known of a saving that only the worst entries of a range have."""

    rows: KeyedSums[Any]

    def add(self, found: Mapping[Any, tuple[float, float] | None], weight: float) -> None:
        """Adds the lowest and highest savings in a range; None where they are not known."""
        unknown = (0.0, 0.0, 1.0)
        rows = [unknown if saved is None else (*saved, 0.0) for saved in found.values()]
        self.rows.add(list(found), rows, weight)

    def means(self, whole: float) -> dict[Any, tuple[float, float] | None]:
        """Key -> the mean per step over the ranges in which it is known."""
        found: dict[Any, tuple[float, float] | None] = {}
        for key, (low, high, unknown) in self.rows.items():
            known = whole - (unknown or 0.0)
            some = known >= (1 - _MOST_UNKNOWN) * whole
            found[key] = ((low or 0.0) / known, (high or 0.0) / known) if some else None
        return found


class SteadyMerger:
    """Merges the measures of ranges, which are added in any order."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._lateness: dict[int, RankLateness] = {}
        self._took_part: KeyedSums[int] = KeyedSums(1)
        self._straggler_saves = _Saving(KeyedSums(3))
        self._tensors = _TensorMerger()
        self._parts: KeyedSums[tuple[str, int, str | None]] = KeyedSums(2)
        self._path_ranks: KeyedSums[tuple[int, str]] = KeyedSums(1)
        self._savings: KeyedSums[str] = KeyedSums(len(_SAVINGS))
        self._pipelines: dict[tuple[int, ...], list[tuple[float, Pipeline]]] = defaultdict(list)
        self._waiting: KeyedSums[str] = KeyedSums(3)
        self._rank_waiting: KeyedSums[int] = KeyedSums(2)
        self._causes = _CauseMerger()
        self._facts: list[tuple[float, JobFacts]] = []
        self._dimensions: dict[str, DimensionTimes] = {}

    def add(self, part: Measured) -> None:
        """Adds the measures of a range of steady steps."""
        weight, steady = float(len(part.steps)), part.steady
        self._weight += weight
        for rank, late in steady.lateness.ranks.items():
            known = self._lateness.get(rank)
            self._lateness[rank] = late if known is None else RankLateness.merged([known, late])
        saves = {rank: steady.straggler_saves.get(rank) for rank in steady.lateness.ranks}
        self._straggler_saves.add(
            {rank: None if us is None else (us, us) for rank, us in saves.items()}, weight
        )
        took_part = steady.lateness.took_part
        self._took_part.add(list(took_part), [(count,) for count in took_part.values()])
        self._tensors.add(steady.tensors, int(part.steps.number[0]))
        self._parts.add(
            [(row.category, row.rank, row.name) for row in steady.parts],
            [(row.us, row.alone_us) for row in steady.parts],
            weight,
        )
        self._path_ranks.add(
            [(row.rank, row.category) for row in steady.path_ranks],
            [(row.us,) for row in steady.path_ranks],
            weight,
        )
        if steady.savings is not None:
            values = [getattr(steady.savings, name) for name in _SAVINGS]
            self._savings.add([""], [values], weight)
        for pipeline in steady.pipelines:
            self._pipelines[pipeline.ranks].append((weight, pipeline))
        waiting = steady.waiting
        totals = (waiting.total_us, waiting.p2p_us, waiting.unknown_us)
        self._waiting.add([""], [totals], weight)
        self._rank_waiting.add(
            [row.rank for row in waiting.ranks],
            [(row.waits_us, row.causes_us) for row in waiting.ranks],
            weight,
        )
        self._causes.add(steady.root_causes, weight)
        self._facts.append((weight, steady.facts))
        self._dimensions = merged_dimensions([self._dimensions, steady.dimensions])

    def result(self) -> SteadyMeasures:
        """The measures of all ranges."""
        weight = self._weight
        ((_, waiting),) = self._waiting.items()
        waits = [(value or 0.0) / weight for value in waiting]
        took_part = {rank: round(count or 0.0) for rank, (count,) in self._took_part.items()}
        saves = self._straggler_saves.means(weight)
        savings = [
            Savings(*((value or 0.0) / weight for value in values))
            for _, values in self._savings.items()
        ]
        return SteadyMeasures(
            lateness=Lateness(dict(sorted(self._lateness.items())), took_part),
            straggler_saves={rank: pair[1] for rank, pair in saves.items() if pair is not None},
            tensors=self._tensors.result(),
            parts=_path_parts(self._parts, weight),
            path_ranks=_path_ranks(self._path_ranks, weight),
            savings=savings[0] if savings else None,
            pipelines=tuple(map(_pipeline, sorted(self._pipelines.values(), key=_first_rank))),
            waiting=Waiting(
                total_us=waits[0],
                p2p_us=waits[1],
                unknown_us=waits[2],
                ranks=tuple(
                    RankWaiting(rank, (own or 0.0) / weight, (of or 0.0) / weight)
                    for rank, (own, of) in sorted(self._rank_waiting.items())
                ),
            ),
            root_causes=self._causes.result(weight, waits[0]),
            facts=_job_facts(self._facts),
            dimensions=self._dimensions,
        )


def _path_ranks(sums: KeyedSums[tuple[int, str]], weight: float) -> tuple[PathRank, ...]:
    rows = [
        PathRank(category, rank, (us or 0.0) / weight) for (rank, category), (us,) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.rank, CATEGORIES.index(row.category))))


def _path_parts(
    sums: KeyedSums[tuple[str, int, str | None]], weight: float
) -> tuple[PathPart, ...]:
    rows = [
        (category, rank, name, us or 0.0, alone or 0.0)
        for (category, rank, name), (us, alone) in sums.items()
    ]
    total = sum(row[3] for row in rows)
    return tuple(
        PathPart(
            category=category,
            rank=rank,
            name=name,
            us=us / weight,
            alone_us=alone / weight,
            share=us / total if total else 0.0,
        )
        for category, rank, name, us, alone in sorted(rows, key=lambda row: -row[3])
    )


def _first_rank(pipelines: Sequence[tuple[float, Pipeline]]) -> tuple[int, ...]:
    return pipelines[0][1].ranks


def _pipeline(parts: Sequence[tuple[float, Pipeline]]) -> Pipeline:
    """One pipeline, over the steps of the ranges in which it was found."""
    stages = tuple(
        _stage([(weight, pipeline.stages[place]) for weight, pipeline in parts])
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


def _stage(parts: Sequence[tuple[float, PipelineStage]]) -> PipelineStage:
    weights = [weight for weight, _ in parts]

    def mean(name: str) -> float:
        return float(np.average([getattr(stage, name) for _, stage in parts], weights=weights))

    def means(name: str) -> tuple[float, ...]:
        lists = [getattr(stage, name) for _, stage in parts]
        width = max(map(len, lists))
        padded = [np.pad(values, (0, width - len(values))) for values in map(np.array, lists)]
        return tuple(np.average(padded, axis=0, weights=weights).tolist()) if width else ()

    first = parts[0][1]
    return PipelineStage(
        rank=first.rank,
        stage=first.stage,
        step_us=mean("step_us"),
        work_us=mean("work_us"),
        bubble_us=mean("bubble_us"),
        waiting_us=mean("waiting_us"),
        transfer_us=mean("transfer_us"),
        forward_us=means("forward_us"),
        backward_us=means("backward_us"),
    )


class _CauseMerger:
    """Merges root causes of waiting."""

    def __init__(self) -> None:
        self._costs: KeyedSums[tuple[int, str, int | None]] = KeyedSums(3)
        self._saves = _Saving(KeyedSums(3))
        self._names: dict[tuple[int, str, int | None], tuple[float, str]] = {}

    def add(self, causes: Iterable[RootCause], weight: float) -> None:
        """Adds the causes of a range."""
        rows = list(causes)
        keys = [(row.rank, row.activity, row.peer) for row in rows]
        costs = [(row.direct_us, row.propagated_us, row.slower_us) for row in rows]
        self._costs.add(keys, costs, weight)
        self._saves.add(dict(zip(keys, map(_range_of, rows), strict=True)), weight)
        for key, row in zip(keys, rows, strict=True):
            cost = row.cost_us * weight
            if row.name is not None and cost > self._names.get(key, (0.0, ""))[0]:
                self._names[key] = (cost, row.name)

    def result(self, weight: float, waiting_us: float) -> tuple[RootCause, ...]:
        """All causes, the most expensive first.

        Args:
            weight: Number of steps.
            waiting_us: All waiting per step.
        """
        saves = self._saves.means(weight)
        rows = []
        for key, sums in self._costs.items():
            direct, propagated, slower = ((value or 0.0) / weight for value in sums)
            known, between = known_or_range(saves[key])
            rows.append(
                RootCause(
                    rank=key[0],
                    activity=key[1],
                    peer=key[2],
                    name=self._names[key][1] if key in self._names else None,
                    direct_us=direct,
                    propagated_us=propagated,
                    slower_us=slower,
                    share=(direct + propagated) / waiting_us if waiting_us else 0.0,
                    saves_us=known,
                    saves_range_us=between,
                )
            )
        return tuple(sorted(rows, key=lambda row: -row.cost_us))


def _range_of(row: RootCause) -> tuple[float, float] | None:
    """The lowest and the highest saving of a cause; None if it was not found."""
    if row.saves_range_us is not None or row.saves_us is None:
        return row.saves_range_us
    return row.saves_us, row.saves_us


class _TensorMerger:
    """Merges the times of parameters."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._bytes: list[int] = []
        self._times: list[tuple[FloatArray, FloatArray, float]] = []
        self._sums: KeyedSums[str] = KeyedSums(2)
        self._weight = 0.0
        self._courses: dict[int, TensorTimes] = {}

    def add(self, times: TensorTimes, first_step: int) -> None:
        """Adds the times in a range, which begins with some step."""
        weight = float(times.rank_steps.sum())
        self._weight += weight
        for row in times.rows:
            if row.name not in self._places:
                self._places[row.name] = len(self._bytes)
                self._bytes.append(row.bytes)
        rows = [[getattr(row, name) for name in _TENSOR_TIMES] for row in times.rows]
        if rows:
            places = np.array([self._places[row.name] for row in times.rows])
            self._times.append((places, np.array(rows, dtype=np.float64), weight))
        self._sums.add(
            [row.name for row in times.rows],
            [(row.exposed_us, row.messages) for row in times.rows],
            weight,
        )
        self._courses[first_step] = times._replace(rows=())

    def result(self) -> TensorTimes:
        """The times in all ranges."""
        medians = self._medians()
        weight = max(self._weight, 1.0)
        rows = []
        for name, (exposed, messages) in self._sums.items():
            values = medians[self._places[name]].tolist()
            times = {
                column: None if np.isnan(value) else value
                for column, value in zip(_TENSOR_TIMES, values, strict=True)
            }
            bucket = times.pop("bucket")
            rows.append(
                TensorRow(
                    name=name,
                    bytes=self._bytes[self._places[name]],
                    exposed_us=None if exposed is None else exposed / weight,
                    messages=(messages or 0.0) / weight,
                    bucket=None if bucket is None else round(bucket),
                    **times,
                )
            )
        course, rank_steps = self._course()
        return TensorTimes(sorted_rows(rows), course, rank_steps)

    def _medians(self) -> FloatArray:
        """The medians of the ranges' medians, shape (tensors, times); NaN for unknown ones."""
        found = np.full((len(self._bytes), len(_TENSOR_TIMES)), np.nan)
        # In steps without a gradient, messages carry a parameter for other reasons.
        ready = [
            np.isfinite(times[:, _TENSOR_TIMES.index("ready_us")]) for _, times, _ in self._times
        ]
        trained = np.zeros(len(self._bytes), dtype=bool)
        for (places, _, _), known in zip(self._times, ready, strict=True):
            trained[places[known]] = True
        values = np.full((len(self._times), len(self._bytes)), np.nan)
        weights = np.array([weight for _, _, weight in self._times])
        for column in range(len(_TENSOR_TIMES)):
            values[:] = np.nan
            for part, (places, times, _) in enumerate(self._times):
                counts = ready[part] | ~trained[places]
                values[part, places[counts]] = times[counts, column]
            found[:, column] = weighted_medians(values, weights)
        return found

    def _course(self) -> tuple[dict[str, FloatArray], Any]:
        """The exposed time of each tensor in at most `MAX_PERIODS` periods, and their steps."""
        courses = [self._courses[step] for step in sorted(self._courses)]
        rank_steps = np.concatenate([times.rank_steps for times in courses])
        count = len(rank_steps)
        group = np.arange(count) * min(MAX_PERIODS, count) // max(count, 1)
        first = np.flatnonzero(np.append(True, np.diff(group) > 0))[: max(count, 0)]
        sums = np.add.reduceat(rank_steps, first) if count else rank_steps
        names = {name: None for times in courses for name in times.course}
        course = {}
        for name in names:
            of_period = [
                times.course.get(name, np.zeros(len(times.rank_steps))) for times in courses
            ]
            exposed = np.concatenate(of_period) * rank_steps
            course[name] = np.add.reduceat(exposed, first) / np.maximum(sums, 1)
        return course, sums


def weighted_medians(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The weighted median of each column: half of the weight is on either side of it.

    Args:
        values: Shape (rows, columns); NaN for unknown ones, which do not count.
        weights: Of each row.

    Returns:
        One value for each column; NaN where none is known.
    """
    if not len(values):
        return np.full(values.shape[1], np.nan)
    order = np.argsort(values, axis=0, kind="stable")  # NaN last
    ordered = np.take_along_axis(values, order, axis=0)
    held = np.cumsum(np.where(np.isnan(ordered), 0.0, weights[order]), axis=0)
    columns = np.arange(values.shape[1])
    low = ordered[np.argmax(held >= held[-1] / 2, axis=0), columns]
    high = ordered[np.argmax(held > held[-1] / 2, axis=0), columns]
    return np.asarray((low + high) / 2)


def _job_facts(parts: Sequence[tuple[float, JobFacts]]) -> JobFacts:
    """Properties of the job over all ranges."""
    facts = [each for _, each in parts]
    by_op: dict[tuple[str, bool], list[tuple[float, Exchange]]] = defaultdict(list)
    for weight, each in parts:
        for exchange in each.exchanges:
            by_op[exchange.op, exchange.gradients].append((weight, exchange))
    whole = sum(weight for weight, _ in parts)
    exchanges = [_exchange(found, whole) for found in by_op.values()]
    links = [(weight, each.link) for weight, each in parts if each.link is not None]
    sharded = any(each.sharded for each in facts)
    return JobFacts(
        exchanges=tuple(sorted(exchanges, key=lambda exchange: -exchange.transfer_us)),
        sharded=sharded,
        replicated=not sharded and any(each.replicated for each in facts),
        buckets=any(each.buckets for each in facts),
        shares_update=any(each.shares_update for each in facts),
        element_bytes=next((each.element_bytes for each in facts if each.element_bytes), None),
        deepspeed=any(each.deepspeed for each in facts),
        update_names=tuple(dict.fromkeys(name for each in facts for name in each.update_names)),
        link=_exchange(links, whole) if links else None,
        sends_in_a_row=sum(weight * each.sends_in_a_row for weight, each in parts) / whole,
    )


def _exchange(parts: Sequence[tuple[float, Exchange]], whole: float) -> Exchange:
    """The exchanges of one operation, means over all steps."""

    def mean(name: str) -> float:
        return sum(weight * float(getattr(each, name)) for weight, each in parts) / whole

    return Exchange(
        op=parts[0][1].op,
        count=mean("count"),
        bytes=mean("bytes"),
        largest=max(each.largest for _, each in parts),
        transfer_us=mean("transfer_us"),
        ranks=max(each.ranks for _, each in parts),
        gradients=parts[0][1].gradients,
    )
