"""Which message an object of the job stands for."""

from __future__ import annotations

import weakref

from ddltrace.tracer.interpose.c10d.waits import _MOST_NESTED, MessageOf
from ddltrace.tracer.record.recorder import Message


class Work:
    """What a launch returns."""


def message(number: int) -> Message:
    return Message(number, "all_reduce", "0", 1, "dispatcher")


def test_the_newest_are_held_until_their_callers_have_them() -> None:
    works, sent = MessageOf(), [message(n) for n in range(_MOST_NESTED + 1)]
    items = [Work() for _ in sent]
    references = [weakref.ref(item) for item in items]
    for item, each in zip(items, sent, strict=True):
        works.add_newest(item, each)
    del item
    items.clear()
    alive = [reference() is not None for reference in references]
    assert alive == [False] + [True] * _MOST_NESTED
    for reference, each in zip(references[1:], sent[1:], strict=True):
        assert works.get(reference()) is each


def test_an_outer_launch_is_held_whatever_ids_came_before() -> None:
    """A job that waits for each message has objects with one and the same id."""
    works = MessageOf()
    for number in range(50):
        waited = Work()
        works.add_newest(waited, message(number))
        works.discard(waited)
        del waited
        outer, sent = Work(), message(1000 + number)
        works.add_newest(outer, sent)
        reference = weakref.ref(outer)
        del outer
        works.add_newest(Work(), message(2000 + number))  # launched within
        assert works.get(reference()) is sent
