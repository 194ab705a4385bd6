"""Which gradients MG-WFBP merges, against plans computed by hand."""

from __future__ import annotations

import random

import pytest
from support.scheduled import Layer, step_time

from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.schedules.base import AfterBackward, InTurn
from ddltrace.experiments.schedules.mgwfbp import MgWfbp, merge
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.errors import UsageError

READY = [0.0, 4.0, 20.0, 30.0, 36.0]


def gradients(ready: list[float], elements: int = 25) -> list[Gradient]:
    """Gradients of float32 elements that are ready at these microseconds."""
    return [Gradient(n, f"p{n}", elements, ready_us=at) for n, at in enumerate(ready)]


def merged(ready: list[float], alpha: float, beta: float) -> list[list[int]]:
    """The gradients in each message."""
    return [[part.gradient for part in m] for m in merge(gradients(ready), alpha, beta)]


@pytest.mark.parametrize("beta", [0.0, 0.1, 1e3])
def test_without_a_start_up_time_it_is_wfbp(beta: float) -> None:
    assert merged(READY, 0.0, beta) == [[0], [1], [2], [3], [4]]
    assert merged([1.0] * 3, 0.0, beta) == [[0], [1], [2]]


def test_a_huge_start_up_time_gives_one_message() -> None:
    assert merged(READY, 1e9, 0.1) == [[0, 1, 2, 3, 4]]


def test_a_plan_computed_by_hand() -> None:
    # 100 bytes each, alpha 5. Gradient 1 comes 4 after 0 could start: they merge and start at 4.
    # Gradient 2 comes 16 later. It waits for the link until 4 + 5 + 0.1 * 200 = 29, so that 3,
    # ready at 30, costs a wait of 1; 4 comes 6 after that.
    assert merged(READY, 5.0, 0.1) == [[0, 1], [2, 3], [4]]
    # On a link without a time per byte, 2 can start at 20, and 3 comes 10 later.
    assert merged(READY, 5.0, 0.0) == [[0, 1], [2], [3], [4]]
    # A wait as long as the start-up time gains nothing.
    assert merged([0.0, 5.0], 5.0, 0.0) == [[0], [1]]


def test_a_gradient_that_is_ready_before_its_turn_waits_for_its_turn() -> None:
    assert merged([10.0, 3.0, 11.0], 2.0, 0.0) == [[0, 1, 2]]


def test_element_types_are_not_mixed() -> None:
    half = Gradient(1, "half", 25, element_bytes=2, dtype="float16", ready_us=1.0)
    first, _, last = gradients([0.0, 1.0, 2.0])
    plan = MgWfbp(alpha_us=1e9, beta_us_per_mb=0.0).plan([first, half, last])
    assert [sorted(m.gradients) for m in plan.messages] == [[0], [1], [2]]


def test_what_is_given_is_not_replaced_by_what_is_measured() -> None:
    assert MgWfbp(steps=2).with_values((7.0, 9.0)) == MgWfbp(2, 7.0, 9.0)
    assert MgWfbp(2, alpha_us=1.0).with_values((7.0, 9.0)) == MgWfbp(2, 1.0, 9.0)


def test_nothing_is_sent_in_backward_while_it_measures() -> None:
    unknown = [Gradient(0, "a", 3), Gradient(1, "b", 2)]
    schedule = MgWfbp(alpha_us=1.0, beta_us_per_mb=1.0)
    plan = schedule.plan(unknown)
    assert [m.gradients for m in plan.messages] == [{0}, {1}]
    assert isinstance(schedule.dispatcher(plan), AfterBackward)
    assert isinstance(schedule.dispatcher(schedule.plan(gradients(READY))), InTurn)


@pytest.mark.parametrize("parameter", ["steps=0", "alpha_us=-1", "beta_us_per_mb=inf"])
def test_wrong_parameters_are_refused(parameter: str) -> None:
    with pytest.raises(UsageError, match=parameter.partition("=")[0]):
        parse(f"mgwfbp:{parameter}")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Ready at 1, 2, 3; messages of 3 end at 4, 7, 10; three forward passes of 1.
        ("wfbp", 13.0),
        ("mgwfbp:alpha_us=0,beta_us_per_mb=65536", 13.0),
        # One message starts at 3 and takes 2 + 3 * 1.
        ("mgwfbp:alpha_us=2,beta_us_per_mb=65536", 11.0),
    ],
)
def test_merging_shortens_a_replayed_step(spec: str, expected: float) -> None:
    layers = [Layer(1.0, 1.0, 4)] * 3
    found = step_time(parse(spec).schedule, layers, lambda m: 2.0 + 0.25 * m.elements)
    assert found == pytest.approx(expected)


def test_merging_is_never_slower_than_wfbp_on_a_link_as_measured() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(200):
        layers = [
            Layer(1.0, draw.uniform(0.1, 3.0), draw.randint(1, 40))
            for _ in range(draw.randint(1, 12))
        ]
        alpha, beta = draw.uniform(0.0, 4.0), draw.uniform(0.0, 0.1)
        schedule = MgWfbp(alpha_us=alpha, beta_us_per_mb=beta * (1 << 20))

        def duration(elements: int, alpha: float = alpha, beta: float = beta) -> float:
            return alpha + beta * 4 * elements

        times = [
            step_time(s, layers, lambda m, d=duration: d(m.elements))
            for s in (schedule, parse("wfbp").schedule)
        ]
        assert times[0] <= times[1] + 1e-9
