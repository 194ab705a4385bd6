"""8-bit block quantization."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ddltrace.experiments.codecs.block_int8 import BlockInt8
from ddltrace.experiments.codecs.kernels.chunks import (
    chunk_elements,
    decoded_chunks,
    float_chunks,
    rounded_up,
    scratch,
)
from ddltrace.experiments.codecs.kernels.codec import as_bytes, finite_or_nan, floats_at_start
from ddltrace.experiments.codecs.kernels.row_codec import ChunkedCodec

_LEVELS = 127.0


class BlockInt8Codec(ChunkedCodec):
    """Rounds to the nearest multiple of the block's largest magnitude / 127.

    A block with an infinite or NaN element decodes to NaN as a whole. Magnitudes outside
    float32's range count as infinite.
    """

    def __init__(self, description: BlockInt8) -> None:
        super().__init__(description)
        self._block = description.block

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all blocks of a chunk together."""
        count, elements = rows.shape
        block = min(self._block, rounded_up(elements))
        blocks = -(-elements // block)
        data = self._empty_payloads(rows)
        codes = data[:, 4 * blocks :].view(torch.int8)
        chunk = chunk_elements(count, elements, rows.device, block)
        for start, stop, values in float_chunks(rows, chunk, block):
            work = scratch("noise", values.numel(), rows.device).view(values.shape)
            first, last = start // block, -(-stop // block)
            part = values.view(count, -1, block)
            magnitudes = work.view(count, -1, block)
            torch.abs(part, out=magnitudes)
            scale = finite_or_nan(magnitudes.amax(2).div_(_LEVELS))
            data[:, 4 * first : 4 * last] = as_bytes(scale)[:, : 4 * (last - first)]
            # Where the scale is zero, so is the block: any divisor will do.
            divisor = scale.masked_fill_(scale == 0, 1.0).unsqueeze(2)
            torch.div(part, divisor, out=magnitudes)
            magnitudes.round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0)
            codes[:, start:stop] = work[:, : stop - start]
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        count = data.shape[0]
        block = min(self._block, rounded_up(elements))
        blocks = -(-elements // block)
        scales = floats_at_start(data, blocks).unsqueeze(2)
        codes = data[:, 4 * blocks :].view(torch.int8)
        chunk = chunk_elements(count, elements, data.device, block)
        for start, stop, work in decoded_chunks(data, elements, chunk):
            first, last = start // block, -(-stop // block)
            work[:, : stop - start].copy_(codes[:, start:stop])
            used = work[:, : (last - first) * block].view(count, -1, block)
            used.mul_(scales[:, first:last])
            yield start, stop, work[:, : stop - start]
