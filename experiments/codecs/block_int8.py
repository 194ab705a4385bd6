"""8-bit block quantization, as ZeRO++ sends gradients (Wang et al., arXiv 2306.10209)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    CodecDescription,
    as_bytes,
    finite_or_nan,
    floats_at_start,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique


@dataclass(frozen=True)
class Blocks(CodecDescription):
    """Blocks of elements, each a float32 scale and a code of each element.

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


class OneByteBlocks(Blocks):
    """Blocks whose codes have one byte."""

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One byte an element and four a block."""
        return elements + 4 * -(-elements // self.block)


@technique(
    "volume",
    "int8",
    "8 bits an element and a scale a block, two quantizations",
    "ZeRO++, arXiv 2306.10209",
)
@dataclass(frozen=True)
class BlockInt8(OneByteBlocks):
    """The codes are signed whole numbers."""

    def codec(self, seed: int | None) -> Codec:
        """Rounding to the nearest."""
        return BlockCodec(self, self.block, 127.0, torch.int8)


class BlockCodec(ChunkedCodec):
    """Scales each block so that its largest magnitude is the largest code, and rounds.

    A block with an infinite or NaN element decodes to NaN as a whole. Magnitudes outside
    float32's range count as infinite.
    """

    def __init__(
        self, description: CodecDescription, block: int, largest: float, codes: torch.dtype
    ) -> None:
        """Takes the parameters.

        Args:
            block: Elements that share one scale.
            largest: The largest code.
            codes: Type of the codes, one byte: whole numbers or floats. Conversion to it rounds
                floats to the nearest, whole numbers have to be rounded before.
        """
        super().__init__(description)
        self._block = block
        self._largest = largest
        self._codes = codes

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all blocks of a chunk together."""
        count, elements = rows.shape
        block = min(self._block, rounded_up(elements))
        blocks = -(-elements // block)
        data = self._empty_payloads(rows)
        codes = data[:, 4 * blocks :].view(self._codes)
        chunk = chunk_elements(count, elements, rows.device, block)
        for start, stop, values in float_chunks(rows, chunk, block):
            work = scratch("noise", values.numel(), rows.device).view(values.shape)
            first, last = start // block, -(-stop // block)
            part = values.view(count, -1, block)
            magnitudes = work.view(count, -1, block)
            torch.abs(part, out=magnitudes)
            scale = finite_or_nan(magnitudes.amax(2).div_(self._largest))
            data[:, 4 * first : 4 * last] = as_bytes(scale)[:, : 4 * (last - first)]
            # Where the scale is zero, so is the block: any divisor will do.
            divisor = scale.masked_fill_(scale == 0, 1.0).unsqueeze(2)
            torch.div(part, divisor, out=magnitudes)
            if not self._codes.is_floating_point:
                magnitudes.round_()
            magnitudes.clamp_(-self._largest, self._largest).nan_to_num_(0.0)
            codes[:, start:stop] = work[:, : stop - start]
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        count = data.shape[0]
        block = min(self._block, rounded_up(elements))
        blocks = -(-elements // block)
        scales = floats_at_start(data, blocks).unsqueeze(2)
        codes = data[:, 4 * blocks :].view(self._codes)
        chunk = chunk_elements(count, elements, data.device, block)
        for start, stop, work in decoded_chunks(data, elements, chunk):
            first, last = start // block, -(-stop // block)
            self._widen(codes[:, start:stop], work[:, : stop - start])
            used = work[:, : (last - first) * block].view(count, -1, block)
            used.mul_(scales[:, first:last])
            yield start, stop, work[:, : stop - start]

    def _widen(self, codes: torch.Tensor, result: torch.Tensor) -> None:
        """Fills a tensor with the values of codes."""
        result.copy_(codes)
