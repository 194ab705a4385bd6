"""DoubleSqueeze: Tang et al., ICML 2019, arXiv 1905.05957."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.feedback import Modifier, WithFeedback
from ddltrace.experiments.codecs.one_bit import OneBit
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.codecs.random_k import RandomK
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "doublesqueeze",
    "two passes of a codec (onebit where none is named), each with its residual",
    "DoubleSqueeze, arXiv 1905.05957",
    modifier="optional",
)
@dataclass(frozen=True)
class DoubleSqueeze(Modifier):
    """Two passes with a codec, ranks to servers and back, each with its own residual.

    Every rank is the server of one shard of each tensor. Without another codec the passes use
    1-bit SGD's.
    """

    def around(self, codec: CodecDescription | None) -> CodecDescription:
        """The codec with residuals on both sides."""
        codec = OneBit() if codec is None else codec
        if codec.keeps_residual:
            raise ValueError("doublesqueeze cannot change a codec that keeps its own residual")
        if isinstance(codec, PowerSgd | RandomK):
            raise ValueError("doublesqueeze cannot change a codec whose payloads are summed")
        return WithFeedback(codec, both_sides=True)
