"""8-bit block quantization, as ZeRO++ sends gradients (Wang et al., arXiv 2306.10209)."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import CodecDescription, ExchangeForm
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "int8",
    "8 bits an element and a scale a block, two quantizations",
    "ZeRO++, arXiv 2306.10209",
)
@dataclass(frozen=True)
class BlockInt8(CodecDescription):
    """Blocks of elements, each a float32 scale and a signed byte an element.

    Attributes:
        block: Elements that share one scale.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if not 8 <= self.block <= 1 << 20:
            raise ValueError("block must be between 8 and 1048576 elements")

    @property
    def alignment(self) -> int:
        """A shard is a number of whole blocks."""
        return self.block

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One byte an element and four a block."""
        return elements + 4 * -(-elements // self.block)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Two quantizations at any number of ranks, from the point where that sends less.

        A rank sends (p - 1) n bytes by all-gather and 2 (p - 1) n / p by all-to-all: on two
        ranks both are the same, and all-gather quantizes only once.
        """
        return "all_gather" if world_size <= 2 else "all_to_all"
