"""The frequency axis without torch: when what is exchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltrace.experiments.frequency.accumulate import Accumulate
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.frequency.diloco import DiLoCo, StreamingDiLoCo
from ddltrace.experiments.frequency.dion import Dion
from ddltrace.experiments.frequency.local_sgd import LocalSgd, PostLocalSgd
from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.errors import UsageError


@given(st.integers(1, 50), st.integers(0, 500))
def test_periods_give_as_many_rounds_as_fit(period: int, steps: int) -> None:
    rounds = steps // period
    assert sum(map(LocalSgd(period).exchanges_after, range(steps))) == rounds
    assert sum(map(DiLoCo(period).exchanges_after, range(steps))) == rounds
    assert sum(map(Accumulate(period).updates_after, range(steps))) == rounds


def test_post_local_sgd_averages_when_pytorch_does() -> None:
    frequency = PostLocalSgd(start=3, period=4)
    assert [frequency.exchanges_gradients(step) for step in range(5)] == [True] * 3 + [False] * 2
    assert [step for step in range(16) if frequency.exchanges_after(step)] == [3, 7, 11, 15]


@given(st.integers(1, 40), st.integers(1, 12))
def test_each_fragment_is_exchanged_once_a_period(period: int, fragments: int) -> None:
    fragments = min(fragments, period)
    frequency = StreamingDiLoCo(period=period, fragments=fragments, delay=0)
    starts = [frequency.starts_after(step) for step in range(3 * period)]
    for begin in range(0, 3 * period, period):
        seen = [fragment for step in starts[begin : begin + period] for fragment in step]
        assert sorted(seen) == list(range(fragments))
    assert starts[period - 1] == [fragments - 1]
    assert max(map(len, starts)) == 1


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_fragments_are_of_about_equal_size(sizes: list[int], fragments: int) -> None:
    parts = StreamingDiLoCo(period=10, fragments=fragments).split(sizes)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    largest = max(sizes, default=0)
    for part in parts:
        assert sum(sizes[index] for index in part) <= sum(sizes) / fragments + largest


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((128, 192), (128, 192, 64, 64)),
        ((100,), (1, 100, 1, 50)),
        ((), (1, 1, 1, 1)),
        ((8, 3, 3, 3), (8, 27, 8, 27)),
        ((67, 10), (67, 10, 1, 10)),
    ],
)
def test_demo_cuts_by_divisors(shape: tuple[int, ...], sides: tuple[int, ...]) -> None:
    assert Demo().sides(shape) == sides


def test_demo_sends_a_value_and_an_index_for_each_coefficient() -> None:
    assert Demo(k=32).wire_bytes((128, 192)) == 6 * 32 * 6
    assert Demo(k=32).wire_bytes((5,)) == 5 * 6


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("localsgd:period=0", "period must be"),
        ("diloco:outer_lr=0", "outer_lr"),
        ("streaming_diloco:period=4,fragments=5", "fragments"),
        ("streaming_diloco:period=4,fragments=2,delay=4", "delay"),
        ("demo+topk", "demo and dion encode"),
        ("localsgd+dgc", "topk"),
        ("localsgd+signsgd", "add feedback"),
        ("localsgd+wfbp", "leave out the schedule"),
        ("lars:eta=0", "eta"),
        ("lamb:trust_min=2,trust_max=1", "trust_min"),
    ],
)
def test_what_cannot_work_is_refused(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(spec)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33])
def test_noloco_pairs_all_ranks_anew_in_each_outer_step(ranks: int) -> None:
    noloco = NoLoCo()
    seen = set()
    for step in range(20):
        partners = [noloco.partner(step, rank, ranks) for rank in range(ranks)]
        alone = [rank for rank, partner in enumerate(partners) if partner is None]
        assert len(alone) == ranks % 2
        for rank, partner in enumerate(partners):
            assert partner is None or (partner != rank and partners[partner] == rank)
        seen.add(tuple(partners))
    assert len(seen) > 1 or ranks < 3


def test_dion_sends_two_factors_of_a_matrix() -> None:
    assert Dion(rank=4).sides((6, 5, 2)) == (6, 10, 4)
    assert Dion(rank=100).sides((6, 10)) == (6, 10, 6)
