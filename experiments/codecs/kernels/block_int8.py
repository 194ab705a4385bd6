"""8-bit block quantization."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from ddltrace.experiments.codecs.block_int8 import BlockInt8
from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks, scratch
from ddltrace.experiments.codecs.kernels.codec import ChunkedCodec, Payload, view_as

_LEVELS = 127.0


class BlockInt8Codec(ChunkedCodec):
    """Rounds to the nearest multiple of the block's largest magnitude / 127.

    A block with an infinite or NaN element decodes to NaN as a whole. Magnitudes outside
    float32's range count as infinite.
    """

    def __init__(self, description: BlockInt8) -> None:
        super().__init__(description)
        self._block = description.block

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        elements, block = flat.numel(), self._block
        blocks = -(-elements // block)
        data = torch.empty(4 * blocks + elements, dtype=torch.uint8, device=flat.device)
        scales = data[: 4 * blocks].view(torch.float32)
        codes = data[4 * blocks :].view(torch.int8)
        chunk = chunk_elements(flat.numel(), flat.device, block)
        work = scratch("noise", chunk, flat.device)
        for start, stop, values in float_chunks(flat, chunk):
            rows = -(-(stop - start) // block)
            part, magnitudes = values[: rows * block].view(rows, block), work[: rows * block]
            magnitudes = magnitudes.view(rows, block)
            torch.abs(part, out=magnitudes)
            scale = magnitudes.amax(1).div_(_LEVELS)
            scale.masked_fill_(~scale.isfinite(), torch.nan)
            scales[start // block : start // block + rows] = scale
            # Where the scale is zero, so is the block: any divisor will do.
            divisor = scale.masked_fill(scale == 0, 1.0).unsqueeze(1)
            torch.div(part, divisor, out=magnitudes)
            magnitudes.round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0)
            codes[start:stop] = work[: stop - start]
        return Payload(data, shape, flat.dtype)

    def _pieces(self, payload: Payload) -> Iterator[tuple[int, int, torch.Tensor]]:
        elements, block = payload.elements, self._block
        blocks = -(-elements // block)
        data = payload.data
        scales = view_as(data[: 4 * blocks], torch.float32)
        codes = data[4 * blocks :].view(torch.int8)
        chunk = chunk_elements(elements, data.device, block)
        work = scratch("decoded", chunk, data.device)
        for start in range(0, elements, chunk):
            stop = min(start + chunk, elements)
            rows = -(-(stop - start) // block)
            work[: stop - start].copy_(codes[start:stop])
            scale = scales[start // block : start // block + rows].unsqueeze(1)
            work[: rows * block].view(rows, block).mul_(scale)
            yield start, stop, work[: stop - start]
