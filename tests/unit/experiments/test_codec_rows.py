"""Tensors of equal length that a codec processes together, compared with one after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from support.sampling import choose_seed, sampled
from support.simulated import codec_messages, simulated_ranks

from ddltrace.experiments.codecs import create
from ddltrace.experiments.codecs.codec import Codec, Payload, RowCodec
from ddltrace.experiments.codecs.codec_exchange import CodecExchange
from ddltrace.experiments.codecs.feedback import FeedbackCodec
from ddltrace.experiments.codecs.random_bits import RandomBits
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.strategy.spec import parse

SEED = choose_seed() % 1000
QUANTIZERS = (
    *("int8:block=64", "int8:block=100", "onebit", "signsgd", "qsgd:s=1", "qsgd:s=4", "ternary"),
    *("qsgd:s=7,bucket=100", "qsgd:s=500", "qsgd:s=4,bucket=8192", "ternary:clip=0"),
    *("fp8:block=64", "int4:block=64", "int4:block=128,rotation=128", "thc:block=64"),
)
SPARSE = ("topk:density=0.1", "topk:density=0.1,chunk=100,bits=2", "dgc:density=0.1,warmup=4")
FEEDBACK = (
    *(f"{spec}+feedback:decay=0.9" for spec in QUANTIZERS),
    *("topk:density=0.1+feedback", "onebit+feedback"),
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LENGTHS = (1, 7, 64, 513, 1000, 4096, 8192 + 24, 20_000)
CASES = sampled(
    list(itertools.product((*QUANTIZERS, *SPARSE, *FEEDBACK), (1, 2, 3, 4, 8, 33), LENGTHS)), 50
)


@pytest.fixture(autouse=True)
def rounding_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random codecs draw other numbers for a matrix than for its rows: here all are equal."""
    monkeypatch.setattr(RandomBits, "draw", lambda self, out: out.fill_(0.0))


def rows_of(count: int, elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of different sizes; among several, one is zero and one is constant."""
    generator = torch.Generator().manual_seed(SEED + seed)
    rows = torch.randn(count, elements, generator=generator)
    rows *= torch.logspace(-2, 2, count).unsqueeze(1)
    if count > 2:
        rows[1], rows[2] = 0, 3
    return rows.to(dtype)


def looped(codec: Codec, rows: torch.Tensor, keys: Sequence[Hashable]) -> list[Payload]:
    return [codec.encode(row, key=key) for row, key in zip(rows, keys, strict=True)]


def assert_near(found: torch.Tensor, expected: torch.Tensor, rounding: float = 1e-6) -> None:
    """Equal but for the order of sums, which may move one in 1,000 elements to the next level.

    Args:
        found: The one.
        expected: The other.
        rounding: Difference in norm that is due to rounding.
    """
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    differences = (found - expected).abs().flatten().sort().values
    moved = max(differences.numel() // 1000, differences.numel() >= 100)
    unmoved = differences[: differences.numel() - moved]
    assert float(unmoved.norm()) <= 0.02 * float(expected.norm()) + rounding
    # From one side of a level to the other.
    assert float(differences[-1]) <= 2.01 * float(expected.abs().max()) + rounding


@pytest.mark.parametrize(("spec", "count", "elements"), CASES)
def test_rows_are_encoded_and_decoded_as_if_each_were_alone(
    spec: str, count: int, elements: int
) -> None:
    dtype = DTYPES[(count + elements + SEED) % 4]
    together, alone = create(spec, seed=1), create(spec, seed=1)
    keys = [("key", row) for row in range(count)]
    for step, bad in enumerate((None, math.nan, None, math.inf)):
        rows = rows_of(count, elements, dtype, step)
        if bad is not None:
            rows[count // 2, elements // 2] = bad
        before = rows.clone()
        data = together.encode_rows(rows, keys)
        payloads = looped(alone, rows, keys)
        assert torch.equal(rows.nan_to_num(1.0), before.nan_to_num(1.0))
        assert [part.numel() for part in data] == [payload.nbytes for payload in payloads]
        matrix = torch.stack(data)
        # Decoding is exact, and on all ranks the same.
        decoded = together.decode_rows(matrix, elements, dtype)
        each = [alone.decode(Payload(part, (elements,), dtype)) for part in data]
        assert torch.equal(decoded.nan_to_num(-1.0), torch.stack(each).nan_to_num(-1.0))
        assert torch.equal(decoded.isnan(), torch.stack(each).isnan())
        assert_near(decoded, torch.stack([alone.decode(payload) for payload in payloads]))
        if isinstance(together, FeedbackCodec) and isinstance(alone, FeedbackCodec):
            assert together.residuals.keys() >= alone.residuals.keys()
            for key, residual in alone.residuals.items():
                size = float(rows.double().nan_to_num(0, 0, 0).norm())
                # A residual is the difference between a tensor and its decoded payload.
                rounding = max(1e-5, torch.finfo(dtype).eps) * size + 1e-6
                assert_near(together.residuals[key], residual, rounding)


@pytest.mark.parametrize("spec", sampled(QUANTIZERS + SPARSE[:2], 6))
@pytest.mark.parametrize(("tensors", "ranks"), [(1, 2), (3, 1), (5, 4), (2, 64)])
@pytest.mark.parametrize("elements", [1, 100, 9001])
def test_sums_over_ranks_are_those_of_the_decoded_tensors(
    spec: str, tensors: int, ranks: int, elements: int
) -> None:
    dtype = DTYPES[(tensors + elements + SEED) % 4]
    codec = create(spec, seed=1)
    rows = rows_of(tensors * ranks, elements, dtype, 0)
    if tensors > 1:
        rows[-1, 0] = math.nan
    data = torch.stack(codec.encode_rows(rows, range(len(rows)))).view(tensors, ranks, -1)
    sums = codec.sum_rows(data, elements, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.zeros(tensors, elements, dtype=wide)
    for total, payloads in zip(expected, data, strict=True):
        for payload in payloads:
            codec.add_to(total, Payload(payload, (elements,), dtype))
    assert sums.dtype == wide
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-3, equal_nan=True)


def test_a_row_that_is_not_finite_leaves_its_own_residual_only() -> None:
    codec = create("onebit+feedback")
    assert isinstance(codec, FeedbackCodec)
    keys = ("a", "b", "c")
    rows = torch.randn(3, 100, generator=torch.Generator().manual_seed(SEED))
    codec.encode_rows(rows, keys)
    before = {key: residual.clone() for key, residual in codec.residuals.items()}
    rows[1, 3] = math.nan
    codec.encode_rows(rows, keys)
    unchanged = [torch.equal(codec.residuals[key], before[key]) for key in keys]
    assert unchanged == [False, True, False]


def test_residuals_may_be_replaced_and_regrouped_between_steps() -> None:
    codec, alone = create("int8:block=64+feedback"), create("int8:block=64+feedback")
    assert isinstance(codec, FeedbackCodec)
    assert isinstance(alone, FeedbackCodec)
    rows = rows_of(4, 64, torch.float32, 0)
    groups = [("a", "b", "c", "d"), ("b", "c"), ("d", "a", "b"), ("a", "b", "c", "d")]
    for step, keys in enumerate(groups):
        part = rows[: len(keys)] * (step + 1)
        codec.encode_rows(part, keys)
        looped(alone, part, keys)
        if step == 1:
            for one in (codec, alone):
                one.residuals = {key: residual * 2 for key, residual in one.residuals.items()}
        for key, residual in alone.residuals.items():
            assert torch.equal(codec.residuals[key], residual), (step, key)


TINY = ((1,), (0,), (3,))
SHAPES = ((40, 30), (1,), (7,), (), (513,), (0,), (64,), (64,), (5000,), (300, 100), (2, 2))


def averages(
    spec: str, ranks: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]
) -> list[list[torch.Tensor]]:
    """What each rank gets in each step; in the second one, rank 0 has a NaN."""
    simulated = simulated_ranks().SimulatedRanks(ranks)
    gradients = [Gradient(i, f"p{i}", math.prod(s), shape=s) for i, s in enumerate(shapes)]
    (message,) = MessagePlan(gradients, [[whole(g) for g in gradients]]).messages
    strategy: Any = parse(spec)

    def one(rank: int) -> list[torch.Tensor]:
        groups = simulated.group(rank, "a"), simulated.group(rank, "b")
        exchange = CodecExchange(strategy.codec, strategy.feedback, *groups)
        exchange.prepare({gradient.index: gradient for gradient in gradients})
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(SEED + 100 * step + rank)
            payload = torch.randn(message.elements, generator=generator).to(dtype)
            if step == 1 and rank == 0:
                payload[message.elements // 2] = math.nan
            found.append(exchange.start(message, payload).wait().clone())
        return found

    results: list[list[torch.Tensor]] = simulated.run(one)
    return results


@pytest.mark.parametrize(
    ("spec", "ranks"),
    sampled(
        list(
            itertools.product(
                (
                    *("int8:block=64", "onebit", "onebit+feedback", "signsgd", "doublesqueeze"),
                    *("qsgd:s=4,bucket=64+feedback", "ternary", "topk:density=0.1+doublesqueeze"),
                    *("signsgd+feedback", "ternary+feedback", "qsgd:s=127", "topk:density=0.1"),
                ),
                (1, 2, 3, 4, 8),
            )
        ),
        8,
    ),
)
def test_a_message_has_the_average_of_tensors_that_are_encoded_alone(
    spec: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[(ranks + SEED) % 2]
    messages = [TINY, SHAPES]
    together = [averages(spec, ranks, dtype, shapes) for shapes in messages]
    for kind in (RowCodec, FeedbackCodec):
        for name in ("encode_rows", "decode_rows", "sum_rows"):
            monkeypatch.setattr(kind, name, getattr(Codec, name))
    alone = [averages(spec, ranks, dtype, shapes) for shapes in messages]
    for message, step in itertools.product(range(len(messages)), range(3)):
        first = together[message][0][step]
        for of_rank in together[message]:
            assert torch.equal(of_rank[step].isnan(), first.isnan())
            assert torch.equal(of_rank[step].nan_to_num(), first.nan_to_num())
        assert_near(first, alone[message][0][step])


@pytest.mark.parametrize(
    "spec",
    [
        *("int8:block=64", "int8:block=64+feedback", "onebit", "onebit+feedback", "signsgd"),
        *("signsgd+feedback", "qsgd:bucket=64", "qsgd:bucket=64+feedback", "ternary"),
        "ternary+feedback",
    ],
)
def test_the_number_of_operations_does_not_grow_with_the_ranks_or_equal_tensors(spec: str) -> None:
    counts = {}
    for ranks, copies in ((4, 1), (64, 1), (4, 8)):
        message = codec_messages().LoopbackMessage(spec, ranks, [(64, 128), (64, 192)] * copies)
        message.run()
        with codec_messages().Operations() as operations:
            message.run()
        counts[ranks, copies] = operations.count
    # Each part of a message of whose length there is another is one view more.
    assert counts[64, 1] <= counts[4, 1]
    assert counts[4, 8] <= counts[4, 1] + 150
