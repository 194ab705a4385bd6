"""Schedules replayed under an injected clock: steps computed by hand."""

from __future__ import annotations

import pytest
from support.scheduled import Layer, step_time

from ddltrace.experiments.messages.message_plan import Message
from ddltrace.experiments.strategy.spec import parse


def quarter_per_element(message: Message) -> float:
    return 0.25 * message.elements


@pytest.mark.parametrize(("spec", "expected"), [("fifo", 6.0), ("wfbp", 5.0)])
def test_two_layers_with_messages_of_one_and_a_half(spec: str, expected: float) -> None:
    # Forward 1 in all, backward 1 + 1, messages 1.5 + 1.5.
    layers = [Layer(0.5, 1.0, 6), Layer(0.5, 1.0, 6)]
    assert step_time(parse(spec).schedule, layers, quarter_per_element) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("computation", "exchange", "expected"), [(3.0, 3.0, 3.0), (3.0, 5.0, 5.0), (5.0, 3.0, 5.0)]
)
def test_one_step_delay_takes_the_longer_of_computation_and_communication(
    computation: float, exchange: float, expected: float
) -> None:
    part = computation / 3
    layers = [Layer(part / 2, part, 6), Layer(part / 2, part, 6)]
    schedule = parse("odsgd").schedule
    found = step_time(schedule, layers, lambda m: exchange * m.elements / 12)
    assert found == pytest.approx(expected)


def test_three_equal_layers_split_the_same_work_differently() -> None:
    layers = [Layer(1 / 3, 2 / 3, 4)] * 3
    assert step_time(parse("wfbp").schedule, layers, lambda _: 1.0) == pytest.approx(14 / 3)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("wfbp", 11.0),
        ("wfbp:wait=layer", 11.0),
        ("tictac", 10.0),
        ("bytescheduler:partition_mb=inf,credit_mb=0", 10.0),
        ("p3:slice=1", 9.0),
    ],
)
def test_priority_and_slices_help_where_the_output_layer_is_large(
    spec: str, expected: float
) -> None:
    # Forward 1 and backward 1 each, messages 1, 1, 5; a slice of one element takes 0.25.
    layers = [Layer(1.0, 1.0, size) for size in (4, 4, 20)]
    assert step_time(parse(spec).schedule, layers, quarter_per_element) == pytest.approx(expected)


@pytest.mark.parametrize("spec", ["wfbp", "tictac", "p3:slice=1"])
def test_priority_cannot_help_where_the_input_layer_is_large(spec: str) -> None:
    layers = [Layer(1.0, 1.0, size) for size in (20, 4, 4)]
    assert step_time(parse(spec).schedule, layers, quarter_per_element) == pytest.approx(11.0)
