"""Every element travels exactly once, or there is no plan."""

from __future__ import annotations

import pytest

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice, whole

A = Gradient(0, "a", 10)
B = Gradient(1, "b", 4)
HALF = Gradient(2, "half", 4, element_bytes=2, dtype="float16")


def test_messages_are_numbered_and_weighed() -> None:
    plan = MessagePlan([A, B, HALF], [[Slice(0, 5, 10), whole(B)], [Slice(0, 0, 5)], [whole(HALF)]])
    assert [m.number for m in plan.messages] == [0, 1, 2]
    assert [m.bytes for m in plan.messages] == [36, 20, 8]
    assert [m.elements for m in plan.messages] == [9, 5, 4]
    assert plan.carriers == {0: (0, 1), 1: (0,), 2: (2,)}


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ([[whole(A)]], "'b': 0 of 4"),
        ([[whole(A)], [whole(B)], [whole(B)]], "'b'"),
        ([[Slice(0, 0, 6)], [Slice(0, 5, 10)], [whole(B)]], "'a': element 5"),
        ([[Slice(0, 0, 5)], [Slice(0, 6, 10)], [whole(B)]], "'a': element 5"),
        ([[Slice(0, 0, 11)], [whole(B)]], "'a': 11 of 10"),
        ([[whole(A)], [whole(B)], [Slice(7, 0, 1)]], "do not exist"),
    ],
)
def test_a_plan_that_loses_or_repeats_elements_is_refused(
    contents: list[list[Slice]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        MessagePlan([A, B], contents)


def test_a_message_has_one_element_type() -> None:
    with pytest.raises(ValueError, match="element types"):
        MessagePlan([A, HALF], [[whole(A), whole(HALF)]])
