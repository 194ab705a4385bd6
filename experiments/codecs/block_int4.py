"""4-bit block quantization of rotated gradients, as SDP4Bit sends them.

Jia et al., NeurIPS 2024, arXiv 2410.15526: a Hadamard transform of short groups spreads outliers,
which would otherwise set the scale of a whole block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.codecs.block_int8 import Blocks
from ddltrace.experiments.codecs.chunks import (
    chunk_elements,
    decoded_chunks,
    float_chunks,
    rounded_up,
    scratch,
)
from ddltrace.experiments.codecs.codec import (
    ChunkedCodec,
    Codec,
    as_bytes,
    finite_or_nan,
    floats_at_start,
    packed_bytes,
)
from ddltrace.experiments.codecs.hadamard import size_for, transform
from ddltrace.experiments.codecs.packing import PackedLevels, unit_elements
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

_LARGEST: Final = 7
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


class BlockInt4Codec(ChunkedCodec):
    """Transforms, and rounds to the nearest multiple of the block's largest magnitude / 7.

    A block with an infinite or NaN element decodes to NaN as a whole.
    """

    def __init__(self, description: BlockInt4) -> None:
        super().__init__(description)
        self._of = description

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all blocks of a chunk together."""
        count, elements = rows.shape
        codes, rotation, block, blocks = self._geometry(elements)
        data = self._empty_payloads(rows)
        unit = unit_elements(self._of.block)
        levels = PackedLevels(data[:, 4 * blocks :], codes, _BITS, unit)
        chunk = chunk_elements(count, elements, rows.device, block, unit)
        for start, stop, values in float_chunks(rows, chunk, block):
            first, last = start // block, -(-stop // block)
            part = transform(values.view(count, -1, rotation)).view(count, -1, block)
            magnitudes = scratch("noise", part.numel(), rows.device).view(part.shape)
            step = finite_or_nan(torch.abs(part, out=magnitudes).amax(2).div_(_LARGEST))
            # The inverse is the transform itself, divided by its size.
            scale = step / rotation
            data[:, 4 * first : 4 * last] = as_bytes(scale)[:, : 4 * (last - first)]
            # Where the step is zero, so is the block: any divisor will do.
            part.div_(step.masked_fill_(step == 0, 1.0).unsqueeze(2)).round_()
            part.clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0).add_(_LARGEST)
            end = min(start + chunk, codes)
            levels.write(start, end, part.view(count, -1)[:, : rounded_up(end - start)])
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        count = data.shape[0]
        codes, rotation, block, blocks = self._geometry(elements)
        scales = floats_at_start(data, blocks).unsqueeze(2)
        unit = unit_elements(self._of.block)
        levels = PackedLevels(data[:, 4 * blocks :], codes, _BITS, unit)
        chunk = chunk_elements(count, elements, data.device, block, unit)
        for start, stop, work in decoded_chunks(data, codes, chunk):
            first, last = start // block, -(-stop // block)
            levels.read(start, stop, work)
            used = work[:, : (last - first) * block].sub_(_LARGEST)
            values = transform(used.view(count, -1, rotation)).view(count, -1, block)
            values.mul_(scales[:, first:last])
            end = min(stop, elements)
            yield start, end, values.view(count, -1)[:, : end - start]

    def _geometry(self, elements: int) -> tuple[int, int, int, int]:
        """Number of codes, elements of a transform and of a block, and number of blocks."""
        rotation = size_for(elements, self._of.rotation)
        block = min(self._of.block, rounded_up(elements, max(8, rotation)))
        return self._of.codes(elements), rotation, block, -(-elements // block)
