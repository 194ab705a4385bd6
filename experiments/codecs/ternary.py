"""TernGrad: Wen et al., NeurIPS 2017, arXiv 1705.07878."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm, packed_bytes
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "ternary",
    "random rounding to -1, 0 or 1 times one scale of all ranks",
    "TernGrad, arXiv 1705.07878",
)
@dataclass(frozen=True)
class Ternary(CodecDescription):
    """Each element -1, 0 or 1 times one scale, at random, without bias for the clipped tensor.

    Attributes:
        clip: Elements are clipped at this many standard deviations first; 0 clips nothing. A
            tensor whose elements are all equal is never clipped.
    """

    clip: float = 2.5

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ValueError("clip must be 0 or a positive number")

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Two bits an element and one float32 scale."""
        return 4 + packed_bytes(elements, 2) if elements else 0

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather where it sends no more than two encodings of every shard would."""
        return "all_gather" if world_size <= 2 else "all_to_all"

    @property
    def second_pass(self) -> CodecDescription:
        """Without clipping: averages of few values have outliers that are not noise."""
        return replace(self, clip=0.0)
