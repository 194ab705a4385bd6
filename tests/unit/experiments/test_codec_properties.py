"""Properties of every codec, over many shapes, element types and seeds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import sampled

from ddltrace.experiments.codecs import CODECS, create, read
from ddltrace.experiments.codecs.codec import kept_elements
from ddltrace.experiments.codecs.codec_exchange import combination_of
from ddltrace.experiments.codecs.dgc import Dgc, DgcCodec
from ddltrace.experiments.codecs.feedback import FeedbackCodec
from ddltrace.experiments.codecs.packing import PackedLevels, pack, unit_elements, unpack
from ddltrace.experiments.codecs.power_sgd import orthonormal
from ddltrace.experiments.codecs.random_bits import RandomBits
from ddltrace.experiments.codecs.sparse import largest
from ddltrace.experiments.codecs.thc import ThcCodec
from ddltrace.experiments.strategy.job_checks import refused_ranks
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.technique import Technique, on_axis
from ddltrace.tracer.errors import UsageError

SPECS = sampled(
    [
        *(
            "fp16",
            "bf16",
            "int8:block=64",
            "int8:block=100",
            "onebit",
            "onebit+feedback",
            "signsgd",
        ),
        *(
            "signsgd+feedback",
            "qsgd:s=1",
            "qsgd:s=4",
            "qsgd:s=7,bucket=100",
            "qsgd:s=500",
            "ternary",
        ),
        *("topk:density=0.1", "topk:density=0.01+feedback", "dgc:density=0.01", "doublesqueeze"),
        *("randomk:density=0.1", "randomk:density=0.1+feedback", "powersgd:rank=2"),
        *("powersgd:rank=1+feedback", "topk:density=0.1+doublesqueeze", "qsgd+feedback"),
        *("ternary+feedback", "int8+feedback", "fp16+feedback", "topk:density=0.1,chunk=100"),
        *("topk:density=0.05,chunk=64,bits=2", "topk:density=0.1,chunk=1000,bits=3+feedback"),
        *("fp8", "fp8:form=e5m2,block=100", "fp8+feedback", "int4", "int4:block=8,rotation=1"),
        *("int4:block=64,rotation=64+feedback", "thc", "thc:block=64+feedback"),
    ],
    19,
)
SHAPES = ((), (0,), (1,), (3, 0), (7,), (1001,), (3, 5, 2, 4), (64, 33), (70001,))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SEED = torch.initial_seed() % 1000

numbers = st.floats(-1e6, 1e6, width=32)
vectors = st.lists(numbers, min_size=1, max_size=300).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)
quick = settings(max_examples=40, deadline=None)


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("spec", SPECS)
def test_shape_type_and_size_hold_for_every_tensor(spec: str) -> None:
    codec = create(spec)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        tensor = drawn(shape, dtype)
        before = tensor.clone()
        expected = codec.payload_bytes(shape, dtype, key=(shape, dtype))
        payload = codec.encode(tensor, key=(shape, dtype))
        decoded = codec.decode(payload)
        assert payload.nbytes == expected
        assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
        assert decoded.is_contiguous()
        assert torch.equal(tensor, before)


@pytest.mark.parametrize("spec", [s for s in SPECS if "powersgd" not in s and "dgc" not in s])
@pytest.mark.parametrize("elements", [0, 1, 9, 1000, 4097])
def test_the_pure_size_is_the_payloads(spec: str, elements: int) -> None:
    assert create(spec).encode(drawn((elements,))).nbytes == read(spec).wire_bytes(elements)


@pytest.mark.parametrize("spec", SPECS)
def test_layout_in_memory_does_not_matter(spec: str) -> None:
    tensor = drawn((12, 10, 3, 4))
    strided = tensor.to(memory_format=torch.channels_last)
    assert not strided.is_contiguous()
    transposed = tensor.transpose(0, 1)
    one, other, third = (create(spec, seed=3) for _ in range(3))
    decoded = one.decode(one.encode(tensor))
    assert torch.equal(other.decode(other.encode(strided)), decoded)
    result = third.decode(third.encode(transposed))
    again = create(spec, seed=3)
    assert torch.equal(result, again.decode(again.encode(transposed.contiguous())))


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_decode_to_zeros(spec: str) -> None:
    codec = create(spec)
    decoded = codec.decode(codec.encode(torch.zeros(5, 300)))
    if spec == "signsgd":  # the vote of a zero is drawn at random, as its description says
        assert torch.equal(decoded.abs(), torch.ones(5, 300))
        # Five standard deviations of the mean of 1,500 fair votes.
        assert abs(float(decoded.mean())) < 5 / 1500**0.5
        assert not torch.equal(codec.decode(codec.encode(torch.zeros(5, 300))), decoded)
    else:
        assert torch.equal(decoded, torch.zeros(5, 300))


@pytest.mark.parametrize(
    "technique", on_axis("volume", CODECS), ids=lambda technique: technique.name
)
def test_every_entry_has_a_codec(technique: Technique) -> None:
    name = technique.name if technique.modifier is None else f"onebit+{technique.name}"
    codec = create(name)
    tensor = torch.ones(4, 3)
    assert codec.decode(codec.encode(tensor, key=0)).shape == tensor.shape


def test_ties_of_votes_are_broken_without_bias() -> None:
    """Four ranks' votes, counted and sent on in one bit, as in the exchange of shards."""
    votes = torch.randint(0, 2, (4, 40_000), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    total = votes.sum(0)
    tied = total == 0
    combination_of(create("signsgd")).conclude(total, 4)
    server = create("signsgd")
    sent = server.decode(server.encode(total))
    assert torch.equal(sent[~tied], total[~tied])
    assert set(sent[tied].tolist()) == {-1.0, 1.0}
    assert abs(float(sent[tied].mean())) < 5 / int(tied.sum()) ** 0.5


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_hidden_and_leaves_no_trace(spec: str, bad: float) -> None:
    for shape, dtype in itertools.product([(1,), (999,), (40, 40)], DTYPES):
        codec = create(spec)
        codec.encode(drawn(shape, dtype))
        broken = drawn(shape, dtype, seed=1)
        broken.view(-1)[broken.numel() // 2] = bad
        assert not codec.decode(codec.encode(broken)).isfinite().all()
        for seed in range(3):
            assert codec.decode(codec.encode(drawn(shape, dtype, seed))).isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_what_cannot_be_encoded_is_refused(spec: str) -> None:
    codec = create(spec)
    with pytest.raises(UsageError, match="floating"):
        codec.encode(torch.arange(3))
    with pytest.raises(UsageError, match="sparse"):
        codec.encode(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("topk:density=0", "density"),
        ("topk:chunk=1", "chunk must be"),
        ("topk:bits=2", "bits needs chunk"),
        ("topk:chunk=64,bits=9", "bits must be"),
        ("qsgd:s=0", "s must be"),
        ("feedback", "add one of"),
        ("dgc+feedback", "residual"),
        ("wfbp", "codec 'wfbp': there is no 'wfbp'"),
        ("int8:block=x", "block must be"),
        ("fp8:form=e3m4", "form must be"),
        ("int4:block=100", "powers of two"),
        ("int4:block=16,rotation=32", "at most the block"),
        ("thc:block=100", "power of two"),
        ("thc+doublesqueeze", "payloads are summed"),
    ],
)
def test_a_bad_spec_is_one_clear_line(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        create(spec)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_bits_come_back(bits: int) -> None:
    for count in (8, 16, 1000, 4096):
        codes = torch.randint(0, 1 << bits, (count,), dtype=torch.uint8)
        packed = pack(codes.clone(), bits)
        assert packed.numel() == count * bits // 8
        assert torch.equal(unpack(packed, bits, count), codes)
        # A buffer of several payloads need not be aligned.
        shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), packed])[3:]
        assert torch.equal(unpack(shifted, bits, count), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 11])
@pytest.mark.parametrize("elements", [7, 4096, 3 * 4096 + 13, 70_001])
def test_packed_levels_come_back_in_whatever_pieces(bits: int, elements: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    codes = torch.randint(2**bits, (elements,), generator=generator).float()
    data = torch.empty(-(-elements * bits // 8), dtype=torch.uint8)
    unit = unit_elements()
    for start in range(0, elements, 2 * unit):
        stop = min(start + 2 * unit, elements)
        piece = torch.zeros(-(-(stop - start) // 8) * 8)
        piece[: stop - start] = codes[start:stop]
        PackedLevels(data, elements, bits, unit).write(start, stop, piece)
    found = torch.empty(-(-elements // 8) * 8)
    PackedLevels(data, elements, bits, unit).read(0, elements, found)
    assert torch.equal(found[:elements], codes)


@pytest.mark.parametrize(
    "spec",
    ["qsgd:s=1", "qsgd:s=4,bucket=100", "ternary", "int8", "onebit", "fp8", "int4", "thc"],
)
def test_ranks_with_other_numbers_of_threads_understand_each_other(spec: str) -> None:
    threads = torch.get_num_threads()
    payload = create(spec, seed=SEED).encode(drawn((600_011,), seed=SEED))
    try:
        decoded = []
        for count in (1, 3):
            torch.set_num_threads(count)
            decoded.append(create(spec).decode(payload))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*decoded)


@pytest.mark.parametrize(
    "spec", ["qsgd", "ternary", "int8", "topk:density=0.1", "onebit", "fp8", "int4", "thc"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_a_payload_is_adding_what_it_decodes_to(spec: str, dtype: torch.dtype) -> None:
    codec = create(spec, seed=SEED)
    payload = codec.encode(drawn((9001,), dtype, SEED))
    total = drawn((9001,), seed=SEED + 1)
    expected = total - 0.5 * codec.decode(payload).float()
    codec.add_to(total, payload, factor=-0.5)
    assert torch.allclose(total, expected, atol=1e-6)


@quick
@given(vectors)
def test_int8_errs_by_half_a_step_of_its_block(tensor: torch.Tensor) -> None:
    codec = create("int8:block=32")
    error = (codec.decode(codec.encode(tensor)) - tensor).abs()
    for part, errors in zip(tensor.split(32), error.split(32), strict=True):
        # A scale is a multiple of float32's smallest number, which is 1.4e-45.
        assert float(errors.max()) <= float(part.abs().max()) / 127 * 0.5001 + 1e-43


@pytest.mark.parametrize(("form", "bits", "least"), [("e4m3", 3, -9), ("e5m2", 2, -16)])
@given(vectors)
@quick
def test_fp8_rounds_to_the_nearest_float(
    form: str, bits: int, least: int, tensor: torch.Tensor
) -> None:
    codec = create(f"fp8:form={form},block=32")
    largest = 448.0 if form == "e4m3" else 57344.0
    decoded = codec.decode(codec.encode(tensor))
    for part, found in zip(tensor.split(32), decoded.split(32), strict=True):
        scale = float(part.abs().max()) / largest
        error = (found - part).abs().double()
        # Half of the last bit, and half of the smallest number.
        allowed = part.abs().double() * 2.0 ** -(bits + 1) + 2.0 ** (least - 1) * scale
        assert bool((error <= allowed * 1.0001 + 1e-42).all())


@pytest.mark.parametrize("rotation", [1, 32])
def test_int4_rounds_to_fifteen_levels_of_the_transform(rotation: int) -> None:
    tensor = drawn((256,), seed=SEED)
    codec = create(f"int4:block=128,rotation={rotation}")
    decoded = codec.decode(codec.encode(tensor))
    matrix = torch.ones(1, 1)
    while len(matrix) < rotation:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix = matrix / rotation**0.5
    exact, found = (each.view(-1, rotation) @ matrix for each in (tensor, decoded))
    for part, other in zip(exact.view(-1, 128), found.view(-1, 128), strict=True):
        step = float(part.abs().max()) / 7
        torch.testing.assert_close(other / step, (part / step).round(), atol=1e-3, rtol=0)


def test_a_transform_spreads_outliers() -> None:
    tensor = drawn((4096,), seed=SEED)
    tensor[::128] *= 50
    plain, spread = (
        float((codec.decode(codec.encode(tensor)) - tensor).norm())
        for codec in (create("int4:rotation=1"), create("int4"))
    )
    assert spread < 0.75 * plain


@pytest.mark.parametrize("ranks", [1, 2, 5, 17, 255])
def test_sums_of_thcs_codes_are_the_code_of_the_mean(ranks: int) -> None:
    codec = create("thc:block=64", seed=SEED)
    assert isinstance(codec, ThcCodec)
    tensors = [drawn((1, 1000), seed=SEED + rank) * (rank + 1) for rank in range(ranks)]
    ranges = torch.stack([codec.transformed(each)[1] for each in tensors]).amax(0)
    codes = [codec.codes(codec.transformed(each)[0], ranges, ranks) for each in tensors]
    total = torch.zeros_like(codes[0])
    for each in codes:
        total += each  # in one byte
    assert torch.equal(total.long(), torch.stack(codes).long().sum(0))
    found = torch.empty(1, 1000)
    codec.mean(total, ranges, ranks, found)
    # Each rank's element is off by less than a level, and the transform keeps the norm.
    level = 2 * float(ranges.max()) / (255 // ranks) / 64**0.5
    error = (found - torch.stack(tensors).mean(0)).norm() / 1024**0.5
    assert float(error) < level / ranks**0.5


def test_thc_is_refused_where_a_byte_does_not_hold_the_sum() -> None:
    assert refused_ranks(parse("thc"), 255) is None
    assert "255 ranks at most" in (refused_ranks(parse("thc"), 256) or "")


@quick
@given(vectors)
def test_onebit_has_the_means_of_both_signs(tensor: torch.Tensor) -> None:
    codec = create("onebit")
    decoded = codec.decode(codec.encode(tensor))
    for chosen in (tensor < 0, tensor >= 0):
        if chosen.any():
            mean = tensor[chosen].double().mean()
            assert torch.allclose(decoded[chosen].double(), mean, rtol=1e-5, atol=1e-30)
            assert decoded[chosen].unique().numel() == 1


def test_onebit_takes_the_means_of_the_signs_that_it_sends() -> None:
    # In float32 the first element is zero.
    tensor = torch.tensor([-1e-50, 1.0], dtype=torch.float64)
    codec = create("onebit")
    assert codec.decode(codec.encode(tensor)).tolist() == [0.0, 1.0]


@quick
@given(vectors, st.floats(1e-3, 1e3))
def test_signs_do_not_depend_on_the_scale(tensor: torch.Tensor, scale: float) -> None:
    codec = create("signsgd")
    decoded = codec.decode(codec.encode(tensor))
    assert set(decoded.tolist()) <= {-1.0, 1.0}
    voted = tensor != 0  # zeros vote at random
    again = codec.decode(codec.encode(tensor.double() * scale)).float()
    assert torch.equal(again[voted], decoded[voted])


def test_scaled_signs_have_the_mean_magnitude() -> None:
    tensor = drawn((1000,))
    codec = create("signsgd+feedback")
    decoded = codec.decode(codec.encode(tensor))
    torch.testing.assert_close(decoded.abs(), tensor.abs().mean().expand(1000))


@pytest.mark.parametrize(
    "spec",
    [
        *("qsgd:s=1", "qsgd:s=4", "qsgd:s=300", "ternary:clip=0", "ternary", "randomk:density=0.2"),
        *("thc", "thc:block=8"),
    ],
)
def test_random_rounding_is_unbiased(spec: str) -> None:
    tensor = drawn((64,), seed=SEED) * 3
    tensor[:3] = torch.tensor([0.0, 1e-3, -1e-3])
    if spec == "ternary":
        limit = 2.5 * tensor.std(correction=0)
        wanted = tensor.clamp(-limit, limit)
    else:
        wanted = tensor
    codec = create(spec, seed=SEED)
    draws = 2000
    decoded = torch.stack([codec.decode(codec.encode(tensor)) for _ in range(draws)]).double()
    error = (decoded.mean(0) - wanted).abs()
    # Five standard errors, of which 64 elements stay within together with probability 0.99996; a
    # value that was never drawn is as rare as one in `draws`.
    step = float(decoded.abs().max())
    margin = 5 * decoded.std(0) / math.sqrt(draws) + 10 * step / draws
    assert (error <= margin).all(), f"seed {SEED}"


@pytest.mark.parametrize("s", [1, 4, 16])
def test_qsgd_varies_no_more_than_its_bound(s: int) -> None:
    tensor = drawn((400,), seed=SEED)
    codec = create(f"qsgd:s={s}", seed=SEED)
    squares = [
        float((codec.decode(codec.encode(tensor)) - tensor).square().sum()) for _ in range(300)
    ]
    bound = min(400 / s**2, 20 / s) * float(tensor.square().sum())
    assert sum(squares) / len(squares) <= bound


def test_qsgd_uses_the_two_neighbouring_levels() -> None:
    tensor = drawn((512,), seed=SEED)
    codec = create("qsgd:s=4", seed=SEED)
    step = tensor.norm() / 4
    for _ in range(50):
        levels = codec.decode(codec.encode(tensor)) / step
        torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
        assert ((levels - tensor / step).abs() < 1.001).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_qsgd_takes_very_small_and_very_large_values(size: float) -> None:
    tensor = drawn((512,)) * size
    codec = create("qsgd:s=100")
    decoded = codec.decode(codec.encode(tensor))
    assert (decoded - tensor).double().norm() < 0.2 * tensor.double().norm()


def test_ternary_has_three_values_and_one_scale() -> None:
    tensor = drawn((5000,))
    codec = create("ternary")
    values = codec.decode(codec.encode(tensor)).unique()
    limit = 2.5 * tensor.std(correction=0)
    torch.testing.assert_close(values, torch.stack([-limit, limit * 0, limit]))


@pytest.mark.parametrize("elements", [10, 1000, 40_000, 300_001])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_topk_keeps_the_largest(elements: int, density: float) -> None:
    count = kept_elements(elements, density)
    for seed in range(SEED, SEED + 3):
        tensor = drawn((elements,), seed=seed)
        if seed % 3 == 1:
            tensor = tensor.round()  # ties
        elif seed % 3 == 2:
            tensor = tensor.sort().values  # a sample of neighbours would mislead
        chosen = largest(tensor, count)
        assert chosen.unique().numel() == count
        kept = torch.zeros(elements, dtype=torch.bool)
        kept[chosen] = True
        if count < elements:
            assert tensor[kept].abs().min() >= tensor[~kept].abs().max()


@pytest.mark.parametrize("elements", [1, 63, 64, 200, 70_001])
def test_chunked_topk_keeps_the_largest_of_each_chunk(elements: int) -> None:
    tensor = drawn((elements,), seed=SEED)
    decoded = create("topk:density=0.1,chunk=64").decode(
        create("topk:density=0.1,chunk=64").encode(tensor)
    )
    for part, sent in zip(tensor.split(64), decoded.split(64), strict=True):
        kept = sent != 0
        assert int(kept.sum()) == kept_elements(part.numel(), 0.1)
        assert torch.equal(sent[kept], part[kept])
        assert float(part[kept].abs().min()) >= max(part[~kept].abs().tolist(), default=0.0)


@pytest.mark.parametrize("bits", [2, 3, 8])
@given(vectors)
@quick
def test_quantized_topk_sends_no_element_with_an_error_as_large_as_itself(
    bits: int, tensor: torch.Tensor
) -> None:
    codec = create(f"topk:density=0.3,chunk=32,bits={bits}")
    exact = create("topk:density=0.3,chunk=32")
    sent, kept = codec.decode(codec.encode(tensor)), exact.decode(exact.encode(tensor))
    assert bool((sent[kept == 0] == 0).all())
    error = (sent - kept).abs()
    spread = 0.0
    for part, own in zip(kept.split(32), error.split(32), strict=True):
        magnitudes = part[part != 0].abs()
        if magnitudes.numel():
            # Zeros are sent, too, where there are not enough other elements.
            sends_zeros = magnitudes.numel() < kept_elements(part.numel(), 0.3)
            low = 0.0 if sends_zeros else float(magnitudes.min())
            spread = float(magnitudes.max()) - low
            step = spread / (2 ** (bits - 1) - 1)
            assert float(own.max()) <= step / 2 + 1e-6 * float(magnitudes.max()) + 1e-43
    assert bool((error <= kept.abs() * (1 + 1e-6)).all())


def test_sparselocos_payload_is_an_index_and_two_bits_for_each_element_that_is_kept() -> None:
    codec = create("topk:density=0.01,chunk=4096,bits=2")
    elements, kept = 25 * 4096, 25 * 41
    payload = codec.encode(drawn((elements,)))
    assert payload.nbytes == 25 * 8 + -(-kept * 12 // 8) + -(-kept * 2 // 8)


def test_topk_is_exact_where_a_sample_misleads() -> None:
    tensor = torch.zeros(100_000)
    tensor[7:12] = 1.0  # all that is large lies where hardly any sample does
    assert set(largest(tensor, 5).tolist()) == set(range(7, 12))


@pytest.mark.parametrize("spec", [s for s in SPECS if "feedback" in s or "doublesqueeze" in s])
def test_sent_and_residual_are_the_input(spec: str) -> None:
    codec = create(spec)
    assert isinstance(codec, FeedbackCodec)
    shape = (30, 40)
    total, sent = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    former = torch.zeros(shape)
    for seed in range(SEED, SEED + 10):
        tensor = drawn(shape, seed=seed)
        decoded = codec.decode(codec.encode(tensor))
        assert codec.residual is not None
        assert torch.equal(codec.residual, former + tensor - decoded)
        former = codec.residual.clone()
        total += tensor
        sent += decoded
    torch.testing.assert_close(sent + former.double(), total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["topk+feedback", "dgc", "powersgd", "qsgd+feedback"])
def test_a_key_of_another_tensor_is_refused(spec: str) -> None:
    codec = create(spec)
    codec.encode(drawn((20, 30)))
    for shape in ((20, 31), (1, 40)):
        with pytest.raises(UsageError, match="a key of its own"):
            codec.encode(drawn(shape) if spec != "powersgd" else drawn((40, shape[1])))


def test_dgc_accumulates_16_bits_in_32() -> None:
    # In bfloat16, 256 + 1 is 256: what is small would never add up.
    codec, exact = (create("dgc:density=0.01,momentum=0") for _ in range(2))
    for step in range(40):
        tensor = torch.ones(100)
        tensor[0] = 2.0**10  # is sent in each step
        tensor[1] = 256.0 if step == 0 else 1.0
        codec.encode(tensor.to(torch.bfloat16))
        exact.encode(tensor)
    assert isinstance(codec, DgcCodec)
    assert isinstance(exact, DgcCodec)
    assert codec.residual is not None
    assert exact.residual is not None
    assert torch.equal(codec.residual.float(), exact.residual)
    assert float(exact.residual[1]) == 295.0


def test_residuals_belong_to_their_key() -> None:
    codec = create("topk:density=0.1+feedback")
    alone = create("topk:density=0.1+feedback")
    for seed in range(4):
        decoded = codec.decode(codec.encode(drawn((50,), seed=seed), key="a"))
        codec.encode(drawn((70,), seed=seed), key="b")
        assert torch.equal(decoded, alone.decode(alone.encode(drawn((50,), seed=seed))))


def test_a_decaying_residual_is_sparselocos() -> None:
    codec = create("topk:density=0.1+feedback:decay=0.5")
    assert isinstance(codec, FeedbackCodec)
    first, second = drawn((100,)), drawn((100,), seed=1)
    codec.encode(first)
    assert codec.residual is not None
    expected = 0.5 * codec.residual + second
    decoded = codec.decode(codec.encode(second))
    assert torch.equal(codec.residual, expected - decoded)


def test_dgc_without_dropping_is_momentum_sgd() -> None:
    codec = create("dgc:density=1,masking=false,momentum=0.9")
    parameter = torch.nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    ours = torch.zeros(20)
    for seed in range(8):
        gradient = drawn((20,), seed=seed)
        ours -= codec.decode(codec.encode(gradient))
        parameter.grad = gradient
        optimizer.step()
    torch.testing.assert_close(ours, parameter.detach())


def test_dgc_masks_what_it_sent() -> None:
    codec = create("dgc:density=0.05")
    assert isinstance(codec, DgcCodec)
    for seed in range(5):
        decoded = codec.decode(codec.encode(drawn((400,), seed=seed)))
        sent = decoded != 0
        state = codec.state[None]
        assert int(sent.sum()) == 20
        assert not state.momentum[sent].any()
        assert not state.unsent[sent].any()


def test_dgc_clips_at_the_share_of_its_ranks() -> None:
    codec = create("dgc:density=1,clip=2,momentum=0")
    assert isinstance(codec, DgcCodec)
    codec.ranks = 4
    decoded = codec.decode(codec.encode(drawn((100,)) * 50))
    torch.testing.assert_close(decoded.norm(), torch.tensor(1.0))


def test_the_density_of_dgc_falls_as_in_the_paper() -> None:
    description = Dgc(density=0.001, warmup=40)
    densities = [description.density_at(step) for step in range(50)]
    assert densities[::10] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert densities == sorted(densities, reverse=True)
    codec = create("dgc:density=0.01,warmup=8")
    sizes = [codec.encode(drawn((1000,), seed=seed)).nbytes for seed in range(10)]
    assert sizes == [2000, 2000, 496, 496, 128, 128, 80, 80, 80, 80]


def test_randomk_draws_alike_on_all_ranks_and_anew_each_time() -> None:
    one, other = create("randomk:density=0.1"), create("randomk:density=0.1")
    seen = set()
    for _ in range(5):
        mine, theirs = one.encode(torch.ones(997)), other.encode(drawn((997,)))
        kept = one.decode(mine).nonzero().view(-1)
        assert torch.equal(kept, other.decode(theirs).nonzero().view(-1))
        assert kept.numel() == 100
        seen.add(tuple(kept.tolist()))
        torch.testing.assert_close(one.decode(mine)[kept], torch.full((100,), 9.97))
    assert len(seen) == 5


def test_randomk_sends_values_unscaled_below_a_residual() -> None:
    codec = create("randomk:density=0.1+feedback")
    assert set(codec.decode(codec.encode(torch.ones(100))).tolist()) == {0.0, 1.0}


def test_powersgd_finds_a_matrix_of_its_rank() -> None:
    matrix = drawn((40, 2), seed=SEED) @ drawn((2, 50), seed=SEED + 1)
    codec = create("powersgd:rank=2")
    for _ in range(3):
        decoded = codec.decode(codec.encode(matrix))
    torch.testing.assert_close(decoded, matrix, atol=1e-3, rtol=1e-3)


def test_powersgd_projects_onto_orthonormal_columns() -> None:
    matrix = orthonormal(drawn((60, 4), seed=SEED))
    torch.testing.assert_close(matrix.t() @ matrix, torch.eye(4), atol=1e-5, rtol=0)
    dependent = orthonormal(torch.ones(30, 3))
    torch.testing.assert_close(dependent.t() @ dependent, torch.eye(3), atol=1e-5, rtol=0)


def test_making_and_using_codecs_leaves_the_jobs_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    for spec in SPECS:
        codec = create(spec)
        codec.decode(codec.encode(drawn((100, 20))))
    assert torch.equal(torch.rand(4), expected)


def test_codecs_of_one_process_round_differently() -> None:
    tensor = drawn((1000,))
    one, other = create("qsgd:s=2"), create("qsgd:s=2")
    assert not torch.equal(one.decode(one.encode(tensor)), other.decode(other.encode(tensor)))
    same, again = create("qsgd:s=2", seed=4), create("qsgd:s=2", seed=4)
    assert torch.equal(same.decode(same.encode(tensor)), again.decode(again.encode(tensor)))


def test_random_bits_are_uniform_and_independent_from_draw_to_draw() -> None:
    bits = RandomBits(SEED)
    drawn_numbers = torch.empty(2000, 64)
    for row in drawn_numbers:
        bits.draw(row)
    # Uniform whole numbers from -32768 to 32767: mean -0.5, deviation 65536 / sqrt(12).
    deviation = 65536 / math.sqrt(12)
    assert (drawn_numbers.mean(0) + 0.5).abs().max() < 5 * deviation / math.sqrt(2000)
    assert (drawn_numbers.std(0) / deviation - 1).abs().max() < 0.1
    correlation = torch.corrcoef(drawn_numbers.t()) - torch.eye(64)
    assert correlation.abs().max() < 5 / math.sqrt(2000)
    assert drawn_numbers.remainder(2).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("spec", [s for s in SPECS if "feedback" in s or "doublesqueeze" in s])
def test_residuals_do_not_grow_without_bound(spec: str) -> None:
    codec = create(spec)
    assert isinstance(codec, FeedbackCodec)
    norms = []
    for seed in range(200):
        codec.encode(drawn((32, 64), seed=seed))
        assert codec.residual is not None
        norms.append(float(codec.residual.norm()))
    assert max(norms[100:]) < 4 * max(norms[50:100])
