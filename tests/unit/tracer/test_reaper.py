"""Messages that are followed to their end, and what is held of the job's meanwhile.

Their handles are played: those of NCCL cannot be had without a GPU, and `benchmarks/gpu.py` has
them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from ddltrace.tracer.interpose.c10d import reaper
from ddltrace.tracer.interpose.c10d.reaper import Reapers
from ddltrace.tracer.record.recorder import Message


class Work:
    """A handle that completes on request."""

    def __init__(self) -> None:
        self.completed = False


class Followed:
    """Reapers and what they noted."""

    def __init__(self) -> None:
        self.ended: dict[int, bool] = {}
        self.faults: list[tuple[str, Exception]] = []
        self.reapers = Reapers(
            self.wait,
            self.is_completed,
            lambda message, _, failed: self.ended.update({message.id: failed}),
            lambda _: None,
            lambda *fault: self.faults.append(fault),
        )

    @staticmethod
    def wait(work: Work) -> None:
        raise RuntimeError("connection closed by peer")

    @staticmethod
    def is_completed(work: Work) -> bool:
        return work.completed


@pytest.fixture
def followed() -> Iterator[Followed]:
    made = Followed()
    yield made
    made.reapers.stop(5)
    assert made.faults == []


def message(number: int, num_bytes: int) -> Message:
    made = Message(number, "all_gather", "0", 1)
    made.out_bytes = num_bytes
    return made


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ends_are_noted_in_any_order_and_failures_too(followed: Followed) -> None:
    works = [Work(), Work()]
    for number, work in enumerate(works):
        followed.reapers.follow(work, message(number, 8), poll=True)
    works[1].completed = True
    until(lambda: followed.ended == {1: False})
    followed.reapers.follow(Work(), message(2, 8), poll=False)
    until(lambda: followed.ended == {1: False, 2: True})
    works[0].completed = True
    until(lambda: 0 in followed.ended)


def test_little_memory_is_held_to_the_end(followed: Followed) -> None:
    first = message(0, reaper._MAX_HELD_BYTES)
    work = Work()
    followed.reapers.follow(work, first, poll=True)
    assert not followed.reapers.drop(first)
    work.completed = True
    until(lambda: 0 in followed.ended)
    assert not followed.reapers.drop(first)


def test_no_more_memory_of_the_job_is_held_than_some(followed: Followed) -> None:
    half = reaper._MAX_HELD_BYTES // 2
    works = [Work() for _ in range(6)]
    messages = [message(number, half) for number in range(6)]
    for work, each in zip(works, messages, strict=True):
        followed.reapers.follow(work, each, poll=True)
    held = [weakref.ref(work) for work in works]
    works.clear()  # the job drops them
    del work
    # Until no more than allowed is held, whatever the reapers are at.
    assert [followed.reapers.drop(each) for each in messages] == [True] * 4 + [False] * 2
    until(lambda: [reference() is None for reference in held] == [True] * 4 + [False] * 2)
    for reference in held[4:]:
        kept = reference()
        assert kept is not None
        kept.completed = True
        del kept
    until(lambda: followed.ended == {4: False, 5: False})


def test_what_the_job_keeps_anyway_is_never_let_go(followed: Followed) -> None:
    work, large = Work(), message(0, 4 * reaper._MAX_HELD_BYTES)
    followed.reapers.follow(work, large, poll=True, memory_lasts=True)
    assert not followed.reapers.drop(large)
    work.completed = True
    until(lambda: 0 in followed.ended)
