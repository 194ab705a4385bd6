"""The codecs and their modifiers: the volume axis."""

from __future__ import annotations

from typing import Final

from ddltrace.experiments.codecs.block_int8 import BlockInt8
from ddltrace.experiments.codecs.dgc import Dgc
from ddltrace.experiments.codecs.double_squeeze import DoubleSqueeze
from ddltrace.experiments.codecs.feedback import Feedback
from ddltrace.experiments.codecs.half_precision import Bf16, Fp16
from ddltrace.experiments.codecs.one_bit import OneBit
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.codecs.qsgd import Qsgd
from ddltrace.experiments.codecs.random_k import RandomK
from ddltrace.experiments.codecs.sign_sgd import SignSgd
from ddltrace.experiments.codecs.ternary import Ternary
from ddltrace.experiments.codecs.top_k import TopK
from ddltrace.experiments.technique import Technique

_AXIS: Final = "volume"

TECHNIQUES: Final = (
    Technique(
        _AXIS, "fp16", "16-bit floats, summed in 16 bits", "PyTorch's fp16_compress_hook", Fp16
    ),
    Technique(_AXIS, "bf16", "bfloat16, summed in bfloat16", "PyTorch's bf16_compress_hook", Bf16),
    Technique(
        _AXIS,
        "int8",
        "8 bits an element and a scale a block, two quantizations",
        "ZeRO++, arXiv 2306.10209",
        BlockInt8,
    ),
    Technique(
        _AXIS,
        "onebit",
        "signs, decoded to the mean of each sign; use with feedback",
        "1-Bit SGD, Interspeech 2014",
        OneBit,
    ),
    Technique(
        _AXIS,
        "signsgd",
        "signs, decided by majority vote",
        "signSGD, arXiv 1810.05291; with feedback EF-signSGD, arXiv 1901.09847",
        SignSgd,
        needs=("a learning rate for updates of size 1, unless with feedback",),
    ),
    Technique(
        _AXIS,
        "qsgd",
        "random rounding to s levels of a bucket's norm",
        "QSGD, arXiv 1610.02132",
        Qsgd,
    ),
    Technique(
        _AXIS,
        "ternary",
        "random rounding to -1, 0 or 1 times one scale of all ranks",
        "TernGrad, arXiv 1705.07878",
        Ternary,
    ),
    Technique(
        _AXIS,
        "topk",
        "the elements of largest magnitude; use with feedback",
        "Gradient Dropping, EMNLP 2017",
        TopK,
    ),
    Technique(
        _AXIS,
        "dgc",
        "top-k of local momentum with masking, clipping and warm-up",
        "Deep Gradient Compression, arXiv 1712.01887",
        Dgc,
        needs=("SGD; the codec takes over its momentum",),
    ),
    Technique(
        _AXIS,
        "randomk",
        "the same random elements on all ranks",
        "Sparsified SGD with Memory, arXiv 1809.07599",
        RandomK,
    ),
    Technique(
        _AXIS,
        "powersgd",
        "low-rank factors of each matrix; use with feedback",
        "PowerSGD, arXiv 1905.13727",
        PowerSgd,
        needs=("whole tensors: no schedule that cuts them",),
    ),
    Technique(
        _AXIS,
        "doublesqueeze",
        "two passes of a codec (onebit where none is named), each with its residual",
        "DoubleSqueeze, arXiv 1905.05957",
        DoubleSqueeze,
        modifier="optional",
    ),
    Technique(
        _AXIS,
        "feedback",
        "adds what a codec did not send to the next gradient",
        "1-Bit SGD, Interspeech 2014; arXiv 1901.09847",
        Feedback,
        modifier="required",
    ),
)
