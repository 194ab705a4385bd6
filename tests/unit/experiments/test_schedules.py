"""What each schedule sends, in which order, and when: for any order of arrival."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ddltrace.experiments.messages.message_plan import Gradient, Message, MessagePlan
from ddltrace.experiments.schedules.base import Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.p3 import P3, TicTac
from ddltrace.experiments.schedules.wait_free import Fifo, WaitFree

MIB = 1 << 20


def gradients(*sizes: int) -> list[Gradient]:
    """Gradients of these numbers of float32 elements, in the agreed order."""
    return [Gradient(index, f"p{index}", size) for index, size in enumerate(sizes)]


def play(schedule: Schedule, plan: MessagePlan, arrivals: list[int]) -> list[tuple[int, Message]]:
    """Messages with the number of gradients that had arrived when each was started."""
    dispatcher = schedule.dispatcher(plan)
    started = []
    for count, index in enumerate(arrivals, 1):
        started += [(count, message) for message in dispatcher.gradient_ready(index)]
    started += [(len(arrivals), message) for message in dispatcher.backward_ended()]
    return started


def test_fifo_starts_nothing_before_backward_has_ended() -> None:
    plan = Fifo().plan(gradients(3, 2, 1))
    dispatcher = Fifo().dispatcher(plan)
    assert all(not dispatcher.gradient_ready(index) for index in (0, 1, 2))
    assert [m.gradients for m in dispatcher.backward_ended()] == [{0}, {1}, {2}]


def test_wait_free_starts_each_as_it_comes() -> None:
    plan = WaitFree().plan(gradients(3, 2, 1))
    started = play(WaitFree(), plan, [0, 1, 2])
    assert [(count, m.gradients) for count, m in started] == [(1, {0}), (2, {1}), (3, {2})]


def test_wait_free_holds_back_what_is_out_of_turn() -> None:
    plan = WaitFree().plan(gradients(3, 2, 1))
    started = play(WaitFree(), plan, [2, 0, 1])
    assert [(count, m.gradients) for count, m in started] == [(2, {0}), (3, {1}), (3, {2})]


@pytest.mark.parametrize("schedule", [Fifo(), WaitFree(), DdpBuckets(), DdpBuckets(1e-5)])
@given(data=st.data())
def test_any_arrival_gives_the_agreed_order(schedule: Schedule, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 100_000), min_size=1, max_size=12))
    plan = schedule.plan(gradients(*sizes))
    arrivals = data.draw(st.permutations(range(len(sizes))))
    # A parameter may stay without a gradient: all messages go nevertheless.
    arrivals = arrivals[: data.draw(st.integers(0, len(sizes)))]
    started = play(schedule, plan, arrivals)
    assert [m for _, m in started] == list(plan.messages)
    assert sum(m.bytes for m in plan.messages) == 4 * sum(sizes)
    for count, message in started:
        ready = set(arrivals[:count])
        assert message.gradients <= ready or count == len(arrivals)


@pytest.mark.parametrize(
    ("bucket_mb", "sizes_mib", "expected"),
    [
        # The first bucket closes at 1 MiB, the next at 25.
        (None, [0.5, 0.5, 10, 20, 1], [[0, 1], [2, 3], [4]]),
        # A cap that is given holds for the first bucket, too.
        (25, [0.5, 0.5, 10, 20, 1], [[0, 1, 2, 3], [4]]),
        (1, [2, 0.25, 0.25, 0.5, 0.25], [[0], [1, 2, 3], [4]]),
    ],
)
def test_ddp_buckets(
    bucket_mb: float | None, sizes_mib: list[float], expected: list[list[int]]
) -> None:
    plan = DdpBuckets(bucket_mb).plan(gradients(*(int(s * MIB / 4) for s in sizes_mib)))
    assert [[part.gradient for part in m.slices] for m in plan.messages] == expected


def test_ddp_buckets_keep_element_types_apart() -> None:
    mixed = [
        Gradient(0, "a", MIB // 4),
        Gradient(1, "b", 8, element_bytes=2, dtype="float16"),
        Gradient(2, "c", 8),
    ]
    plan = DdpBuckets().plan(mixed)
    assert [[part.gradient for part in m.slices] for m in plan.messages] == [[0], [1], [2]]


@pytest.mark.parametrize("schedule", [P3(slice=3000), TicTac()])
@given(data=st.data())
def test_the_rest_comes_in_the_order_in_which_it_would_have_started(
    schedule: Schedule, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=8))
    plan = schedule.plan(gradients(*sizes))
    arrivals = data.draw(st.permutations(range(len(sizes))))
    arrivals = arrivals[: data.draw(st.integers(0, len(sizes)))]
    # After each arrival, some of what is in flight may have ended.
    ends = data.draw(st.lists(st.integers(0, 3), min_size=len(arrivals), max_size=len(arrivals)))
    orders = []
    for at_once in (False, True):
        dispatcher = schedule.dispatcher(plan)
        started: list[Message] = []
        ended = 0
        for index, more in zip(arrivals, ends, strict=True):
            started += dispatcher.gradient_ready(index)
            for _ in range(more):
                if ended < len(started):
                    ended += 1
                    started += dispatcher.completed(started[ended - 1])
        started += dispatcher.backward_ended()
        if at_once:
            started += dispatcher.rest()
        while ended < len(started):
            ended += 1
            assert len(started) == ended or at_once  # one in flight
            started += dispatcher.completed(started[ended - 1])
        orders.append(started)
    assert orders[0] == orders[1]
    assert sorted(m.number for m in orders[0]) == [m.number for m in plan.messages]
