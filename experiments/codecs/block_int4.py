"""4-bit block quantization of rotated gradients, as SDP4Bit sends them.

Jia et al., NeurIPS 2024, arXiv 2410.15526: a Hadamard transform of short groups spreads outliers,
which would otherwise set the scale of a whole block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.codecs.block_int8 import BlockCodec, Blocks
from ddltrace.experiments.codecs.chunks import rounded_up
from ddltrace.experiments.codecs.codec import Codec, packed_bytes
from ddltrace.experiments.codecs.hadamard import size_for, transform
from ddltrace.experiments.codecs.packing import PackedLevels, unit_elements
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

_LARGEST: Final = 7.0
_BITS: Final = 4


@technique(
    "volume",
    "int4",
    "4 bits an element after a Hadamard transform, two quantizations",
    "SDP4Bit, arXiv 2410.15526",
)
@dataclass(frozen=True)
class BlockInt4(Blocks):
    """Blocks of transformed elements, each a float32 scale and 15 levels in 4 bits an element.

    Attributes:
        block: Elements that share one scale, a power of two.
        rotation: Elements that are transformed together, a power of two; 1 for no transform.
    """

    block: int = 128
    rotation: int = 32

    def __post_init__(self) -> None:
        for value in (self.block, self.rotation):
            if value & (value - 1):
                raise ValueError("block and rotation must be powers of two")
        super().__post_init__()
        if not 1 <= self.rotation <= min(self.block, 4096):
            raise ValueError("rotation must be between 1 and 4096, and at most the block")

    def codec(self, seed: int | None) -> Codec:
        """Rounding to the nearest."""
        return BlockInt4Codec(self)

    def codes(self, elements: int) -> int:
        """Number of codes: whole groups of those that are transformed together."""
        return rounded_up(elements, size_for(elements, self.rotation)) if elements else 0

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Half a byte a code and four a block."""
        return packed_bytes(self.codes(elements), _BITS) + 4 * -(-elements // self.block)


class BlockInt4Codec(BlockCodec):
    """Transforms, and rounds to the nearest multiple of the block's largest magnitude / 7.

    A block with an infinite or NaN element decodes to NaN as a whole.
    """

    def __init__(self, description: BlockInt4) -> None:
        super().__init__(description, _LARGEST, torch.int8)
        self._of = description
        self._unit = unit_elements(description.block)

    def _geometry(self, elements: int) -> tuple[int, int, int, int]:
        rotation = size_for(elements, self._of.rotation)
        block = min(self._of.block, rounded_up(elements, max(8, rotation)))
        return self._of.codes(elements), block, rotation, self._unit

    def _transformed(self, values: torch.Tensor) -> torch.Tensor:
        return transform(values)

    def _write(
        self, data: torch.Tensor, count: int, start: int, stop: int, codes: torch.Tensor
    ) -> None:
        levels = codes.add_(_LARGEST)[:, : rounded_up(stop - start)]
        PackedLevels(data, count, _BITS, self._unit).write(start, stop, levels)

    def _read(
        self, data: torch.Tensor, count: int, start: int, stop: int, out: torch.Tensor
    ) -> None:
        PackedLevels(data, count, _BITS, self._unit).read(start, stop, out)
        out.sub_(_LARGEST)
