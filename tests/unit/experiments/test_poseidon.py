"""Poseidon's rule: where factors of a gradient are exchanged in place of the gradient."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ddltrace.experiments.messages.message_plan import Gradient
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.schedules.wait_free import WaitFree
from ddltrace.experiments.strategy.spec import parse
from ddltrace.tracer.errors import UsageError

SIZES = st.integers(1, 10_000)


@pytest.mark.parametrize(
    ("shape", "rows", "workers", "expected"),
    [
        # The paper's example, a layer of VGG19 on 8 nodes: 3.7 million against 58.7 million.
        ((4096, 4096), 32, 8, True),
        ((4096, 4096), 511, 8, True),
        ((4096, 4096), 512, 8, False),  # equal: the gradient
        ((80, 80), 39, 2, True),
        ((80, 80), 40, 2, False),
        ((3, 80), 3, 2, False),
        ((4096, 4096), 32, 1, False),  # one rank sends nothing in either way
        ((4096, 4096), 0, 8, False),
        ((4096,), 1, 8, False),
        ((64, 64, 3, 3), 1, 8, False),
        ((), 1, 8, False),
    ],
)
def test_rule_by_hand(shape: tuple[int, ...], rows: int, workers: int, expected: bool) -> None:
    assert Poseidon().sends_factors(shape, rows, workers) is expected


@given(outputs=SIZES, inputs=SIZES, rows=SIZES, workers=st.integers(1, 512))
def test_rule_is_that_of_the_paper(outputs: int, inputs: int, rows: int, workers: int) -> None:
    factors = 2 * rows * (workers - 1) * (outputs + inputs)
    gradient = 2 * outputs * inputs * Fraction(workers + workers - 2, workers)
    assert Poseidon().sends_factors((outputs, inputs), rows, workers) is (factors < gradient)


@given(outputs=SIZES, inputs=SIZES, rows=SIZES, workers=st.integers(1, 512))
def test_more_rows_never_bring_factors_back(
    outputs: int, inputs: int, rows: int, workers: int
) -> None:
    fewer, more = (
        Poseidon().sends_factors((outputs, inputs), count, workers) for count in (rows, rows + 1)
    )
    assert fewer or not more


def test_messages_are_those_of_wait_free_backpropagation() -> None:
    gradients = [Gradient(index, f"p{index}", size) for index, size in enumerate((3, 2, 1))]
    assert Poseidon().plan(gradients).messages == WaitFree().plan(gradients).messages


@pytest.mark.parametrize("other", ["fp16", "topk+feedback", "accumulate:steps=2"])
def test_what_changes_gradients_is_refused_beside_it(other: str) -> None:
    assert parse("poseidon").schedule == Poseidon()
    with pytest.raises(UsageError, match="choose wfbp"):
        parse(f"poseidon+{other}")
