"""Messages that are followed to their end by threads that wait or ask for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

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
        self.clocks: dict[int, str] = {}
        self.faults: list[tuple[str, Exception]] = []
        self.reapers = Reapers(
            self.wait,
            self.is_completed,
            self.completed,
            lambda _: None,
            lambda *fault: self.faults.append(fault),
        )

    def completed(self, message: Message, _: int, clock: str, failed: bool) -> None:
        self.clocks[message.id] = clock
        self.ended[message.id] = failed

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


def message(number: int) -> Message:
    return Message(number, "all_gather", "0", 1, "dispatcher")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_ends_are_noted_in_any_order_and_failures_too(followed: Followed) -> None:
    works = [Work(), Work()]
    for number, work in enumerate(works):
        followed.reapers.follow(work, message(number), poll=True)
    works[1].completed = True
    until(lambda: followed.ended == {1: False})
    followed.reapers.follow(Work(), message(2), poll=False)
    until(lambda: followed.ended == {1: False, 2: True})
    works[0].completed = True
    until(lambda: 0 in followed.ended)
    assert followed.clocks == {0: "polling", 1: "polling", 2: "thread"}
