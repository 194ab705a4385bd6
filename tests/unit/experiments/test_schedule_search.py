"""Searches for the parameters of schedules."""

from __future__ import annotations

import itertools
import math

import pytest

from ddltrace.experiments.schedules.bytescheduler import ByteScheduler
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.search import BayesianSearch, GridSearch
from ddltrace.experiments.strategy.spec import parse


def test_a_grid_search_measures_every_candidate_and_takes_the_fastest() -> None:
    search = GridSearch([(1.0,), (4.0,), (25.0,)])
    seen = []
    while (values := search.propose()) is not None:
        seen.append(values)
        search.observe(values, abs(values[0] - 5))
    assert seen == [(1.0,), (4.0,), (25.0,)]
    assert search.best() == (4.0,)


def test_bayesian_optimization_comes_near_the_optimum_of_a_bowl() -> None:
    pytest.importorskip("sklearn")
    grid = list(itertools.product([2.0**power for power in range(-4, 7)], repeat=2))
    search = BayesianSearch((64.0, 0.0625), grid, points=15)

    def seconds(values: tuple[float, ...]) -> float:
        return 1.0 + (math.log2(values[0]) - 1) ** 2 + (math.log2(values[1]) - 3) ** 2

    tried = []
    while (values := search.propose()) is not None:
        tried.append(tuple(values))
        search.observe(values, seconds(tried[-1]))
    assert len(tried) == len(set(tried)) == 15
    # Only 7 % of the grid is as near as this; 15 of 121 points were measured.
    assert seconds(tuple(search.best())) <= 3.0


def test_the_tuner_of_bytescheduler_changes_what_is_sent() -> None:
    schedule = parse("bytescheduler:tune=true,partition_mb=2,credit_mb=inf").schedule
    assert isinstance(schedule, ByteScheduler)
    search = schedule.search()
    assert search is not None
    assert search.propose() == (2.0, 64.0)
    assert schedule.with_values((0.5, 8.0)) == ByteScheduler(0.5, 8.0)
    assert ByteScheduler().search() is None


def test_best_buckets_runs_ddps_buckets_of_a_size() -> None:
    schedule = parse("best_buckets:steps=3").schedule
    assert schedule.search_steps == 3
    assert schedule.with_values((4.0,)) == DdpBuckets(4.0)
