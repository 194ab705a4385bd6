"""Steps of ranks that began to count at different times."""

from __future__ import annotations

import pytest

from ddltrace.tracer.capture.step_marks import StepMarks, match_steps

Marks = list[tuple[int, dict[str, int]]]


def marks(first: int, group: str, *numbers: int) -> Marks:
    return [(first + place, {group: number}) for place, number in enumerate(numbers)]


def test_the_same_messages_end_the_same_steps() -> None:
    found = match_steps({3: marks(7, "0", 30, 40, 50), 5: marks(0, "0", 40, 50, 60)})
    assert found == {3: 0, 5: 8}


def test_ranks_without_a_common_group_are_matched_by_way_of_others() -> None:
    both = [(step, {"a": 10 * step, "b": 7 * step}) for step in range(4)]
    found = match_steps(
        {0: marks(100, "a", 10, 20, 30), 1: both, 2: marks(50, "b", 7, 14), 3: marks(0, "c", 1, 2)}
    )
    assert found == {0: 0, 1: 99, 2: 50}


@pytest.mark.parametrize(
    "other",
    [
        [],
        marks(0, "0", 30),  # one message in common may be chance
        marks(0, "0", 30, 45, 60),  # another number of messages in each step
        marks(0, "0", 30, 30, 50, 50),  # no message tells the steps apart
        marks(0, "another", 30, 40, 50),
    ],
)
def test_others_are_not_guessed(other: Marks) -> None:
    assert match_steps({0: marks(0, "0", 30, 40, 50, 60), 1: other}) == {0: 0}


def test_the_last_step_may_have_another_optimizer() -> None:
    noted = StepMarks()
    for step in (4, 5, 5, 6):
        noted.note(step)
    assert [step for step, _ in noted.ended()] == [4, 5]
