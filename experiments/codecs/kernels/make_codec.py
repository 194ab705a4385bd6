"""Maps codec descriptions to the torch codecs that implement them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ddltrace.experiments.codecs.block_int8 import BlockInt8
from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.dgc import Dgc
from ddltrace.experiments.codecs.feedback import WithFeedback
from ddltrace.experiments.codecs.half_precision import Bf16, Fp16
from ddltrace.experiments.codecs.kernels.block_int8 import BlockInt8Codec
from ddltrace.experiments.codecs.kernels.chunked_top_k import ChunkedTopKCodec
from ddltrace.experiments.codecs.kernels.codec import Codec
from ddltrace.experiments.codecs.kernels.dgc import DgcCodec
from ddltrace.experiments.codecs.kernels.feedback import FeedbackCodec
from ddltrace.experiments.codecs.kernels.half_precision import HalfPrecisionCodec
from ddltrace.experiments.codecs.kernels.one_bit import OneBitCodec
from ddltrace.experiments.codecs.kernels.power_sgd import PowerSgdCodec
from ddltrace.experiments.codecs.kernels.qsgd import QsgdCodec
from ddltrace.experiments.codecs.kernels.random_k import RandomKCodec
from ddltrace.experiments.codecs.kernels.sign_sgd import SignSgdCodec
from ddltrace.experiments.codecs.kernels.ternary import TernaryCodec
from ddltrace.experiments.codecs.kernels.top_k import TopKCodec
from ddltrace.experiments.codecs.one_bit import OneBit
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.codecs.qsgd import Qsgd
from ddltrace.experiments.codecs.random_k import RandomK
from ddltrace.experiments.codecs.sign_sgd import SignSgd
from ddltrace.experiments.codecs.ternary import Ternary
from ddltrace.experiments.codecs.top_k import TopK

_KERNELS: Final[dict[type[CodecDescription], Callable[[Any, int | None], Codec]]] = {
    Fp16: lambda description, seed: HalfPrecisionCodec(description, "float16"),
    Bf16: lambda description, seed: HalfPrecisionCodec(description, "bfloat16"),
    BlockInt8: lambda description, seed: BlockInt8Codec(description),
    OneBit: lambda description, seed: OneBitCodec(description),
    SignSgd: lambda description, seed: SignSgdCodec(description, seed=seed),
    Qsgd: lambda description, seed: QsgdCodec(description, seed=seed),
    Ternary: lambda description, seed: TernaryCodec(description, seed=seed),
    TopK: lambda description, seed: (
        ChunkedTopKCodec(description) if description.chunk else TopKCodec(description)
    ),
    Dgc: lambda description, seed: DgcCodec(description),
    # All ranks must select the same elements, or start from the same factors.
    RandomK: lambda description, seed: RandomKCodec(description, seed=seed or 0),
    PowerSgd: lambda description, seed: PowerSgdCodec(description, seed=seed or 0),
    WithFeedback: lambda description, seed: FeedbackCodec(
        description, make_codec(description.inner, seed=seed)
    ),
}


def make_codec(description: CodecDescription, *, seed: int | None = None) -> Codec:
    """Creates the codec of a description.

    Args:
        description: The codec's parameters.
        seed: Seed of random rounding and selection. By default it differs for every codec of
            the process, except that codecs whose ranks must agree start from 0.
    """
    return _KERNELS[type(description)](description, seed)
