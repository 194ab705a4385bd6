"""Codecs, which encode tensors in fewer bytes for the network.

Each technique is one file with a pure description of its parameters, its wire size and the
exchange that suits it, and with the code that encodes and decodes.
"""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.codecs.block_int4 import BlockInt4
from ddltrace.experiments.codecs.block_int8 import BlockInt8
from ddltrace.experiments.codecs.codec import Codec, CodecDescription, Payload
from ddltrace.experiments.codecs.dgc import Dgc
from ddltrace.experiments.codecs.feedback import DoubleSqueeze, Feedback, Modifier, compose
from ddltrace.experiments.codecs.fp8 import Fp8
from ddltrace.experiments.codecs.half_precision import Bf16, Fp16
from ddltrace.experiments.codecs.one_bit import OneBit
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.codecs.qsgd import Qsgd
from ddltrace.experiments.codecs.random_k import RandomK
from ddltrace.experiments.codecs.sign_sgd import SignSgd
from ddltrace.experiments.codecs.ternary import Ternary
from ddltrace.experiments.codecs.thc import Thc
from ddltrace.experiments.codecs.top_k import TopK
from ddltrace.experiments.grammar import MODIFIER, Grammar
from ddltrace.experiments.technique import on_axis

__all__ = ["Codec", "CodecDescription", "Payload", "create"]

CODECS: Final[tuple[type[CodecDescription | Modifier], ...]] = (
    Fp16,
    Bf16,
    BlockInt8,
    Fp8,
    BlockInt4,
    OneBit,
    SignSgd,
    Qsgd,
    Ternary,
    Thc,
    TopK,
    Dgc,
    RandomK,
    PowerSgd,
    DoubleSqueeze,
    Feedback,
)
"""The built-in codecs and their modifiers, in the order in which they are listed."""

_GRAMMAR: Final = Grammar("codec", lambda: on_axis("volume", CODECS))


def create(spec: str, *, seed: int | None = None) -> Codec:
    """Creates a codec from the volume part of a strategy's spec.

    Args:
        spec: For example ``qsgd:s=4`` or ``topk:density=0.01+feedback``.
        seed: Seed of random rounding and selection. By default it differs for every codec of
            the process, except that codecs whose ranks must agree start from 0.

    Returns:
        The codec; `Codec.encode` and `Codec.decode` are its two directions.

    Raises:
        UsageError: The spec is not valid, or names no codec or another axis.
    """

    return read(spec).codec(seed)


def read(spec: str) -> CodecDescription:
    """The codec that a spec such as ``topk:density=0.01+feedback`` describes.

    Args:
        spec: Name and parameters of a codec, alone or with a modifier.

    Raises:
        UsageError: The spec is not valid, or names another technique than codecs.
    """
    found = _GRAMMAR.read(spec)
    base, modifier = found.get("volume"), found.get(MODIFIER)
    try:
        codec = compose(
            None if base is None else base.of(CodecDescription),
            None if modifier is None else modifier.of(Modifier),
        )
    except ValueError as error:
        raise _GRAMMAR.error(spec, str(error)) from error
    assert codec is not None  # a spec names a codec, or a modifier that makes one
    return codec
