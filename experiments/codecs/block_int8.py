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
class BlockInt8(Blocks):
    """The codes are signed whole numbers."""

    def codec(self, seed: int | None) -> Codec:
        """Rounding to the nearest."""
        return BlockCodec(self, 127.0, torch.int8)


class BlockCodec(ChunkedCodec):
    """Scales each block so that its largest magnitude is the largest code, and rounds.

    A block with an infinite or NaN element decodes to NaN as a whole. Magnitudes outside
    float32's range count as infinite.
    """

    def __init__(self, description: Blocks, largest: float, codes: torch.dtype) -> None:
        """Takes the parameters.

        Args:
            largest: The largest code.
            codes: Type of the codes, one byte: whole numbers or floats. Conversion to it rounds
                floats to the nearest, whole numbers are rounded before.
        """
        super().__init__(description)
        self._blocks = description
        self._largest = largest
        self._codes = codes

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all blocks of a chunk together."""
        count, elements = rows.shape
        data = self._empty_payloads(rows)
        codes, block, rotation, unit = self._geometry(elements)
        blocks = -(-elements // block)
        chunk = chunk_elements(count, elements, rows.device, block, unit)
        for start, stop, values in float_chunks(rows, chunk, block):
            first, last = start // block, -(-stop // block)
            part = self._transformed(values.view(count, -1, rotation)).view(count, -1, block)
            magnitudes = scratch("noise", part.numel(), rows.device).view(part.shape)
            step = finite_or_nan(torch.abs(part, out=magnitudes).amax(2).div_(self._largest))
            # The inverse of the transform is the transform itself, divided by its size.
            data[:, 4 * first : 4 * last] = as_bytes(step / rotation)[:, : 4 * (last - first)]
            # Where the step is zero, so is the block: any divisor will do.
            part.div_(step.masked_fill_(step == 0, 1.0).unsqueeze(2))
            if not self._codes.is_floating_point:
                part.round_()
            part.clamp_(-self._largest, self._largest).nan_to_num_(0.0)
            end = min(start + chunk, codes)
            self._write(data[:, 4 * blocks :], codes, start, end, part.view(count, -1))
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        count = data.shape[0]
        codes, block, rotation, unit = self._geometry(elements)
        blocks = -(-elements // block)
        scales = floats_at_start(data, blocks).unsqueeze(2)
        chunk = chunk_elements(count, elements, data.device, block, unit)
        for start, stop, work in decoded_chunks(data, codes, chunk):
            first, last = start // block, -(-stop // block)
            self._read(data[:, 4 * blocks :], codes, start, stop, work)
            used = work[:, : (last - first) * block]
            values = self._transformed(used.view(count, -1, rotation)).view(count, -1, block)
            values.mul_(scales[:, first:last])
            end = min(stop, elements)
            yield start, end, values.view(count, -1)[:, : end - start]

    def _geometry(self, elements: int) -> tuple[int, int, int, int]:
        """Number of codes, elements of a block and of a transform, and the unit of the codes."""
        block = min(self._blocks.block, rounded_up(elements))
        return elements, block, 1, 1

    def _transformed(self, values: torch.Tensor) -> torch.Tensor:
        """The transform of the last dimension; of one element, the element."""
        return values

    def _write(
        self, data: torch.Tensor, count: int, start: int, stop: int, codes: torch.Tensor
    ) -> None:
        """Stores the codes from `start` to `stop` of `count` codes in each row."""
        data.view(self._codes)[:, start:stop] = codes[:, : stop - start]

    def _read(
        self, data: torch.Tensor, count: int, start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Fetches the values of the codes from `start` to `stop`."""
        out[:, : stop - start].copy_(data.view(self._codes)[:, start:stop])
