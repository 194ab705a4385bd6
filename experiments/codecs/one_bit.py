"""1-bit SGD: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm, packed_bytes
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "onebit",
    "signs, decoded to the mean of each sign; use with feedback",
    "1-Bit SGD, Interspeech 2014",
)
@dataclass(frozen=True)
class OneBit(CodecDescription):
    """The sign of each element; each sign is decoded to the mean of its elements.

    The paper's method is ``onebit+feedback``: without the residual it does not converge.
    """

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One bit an element and two float32 means."""
        return 8 + packed_bytes(elements, 1) if elements else 0

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather only on two ranks, where it sends as much and encodes once."""
        return "all_gather" if world_size <= 2 else "all_to_all"
