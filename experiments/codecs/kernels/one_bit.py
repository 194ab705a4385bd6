"""1-bit SGD's quantizer."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ddltrace.experiments.codecs.kernels.chunks import scratch
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, as_bytes, view_as
from ddltrace.experiments.codecs.kernels.signs import pack_signs, signs_to_values

_HEADER = 8


class OneBitCodec(Codec):
    """One bit an element, and the mean of the negative and of the other elements.

    A tensor with an infinite or NaN element decodes to NaN as a whole.
    """

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        size = self.description.wire_bytes(flat.numel())
        data = torch.empty(size, dtype=torch.uint8, device=flat.device)
        sums = torch.zeros(3, dtype=torch.float64, device=flat.device)

        def add(values: torch.Tensor) -> None:
            part = scratch("exact", values.numel(), values.device)
            sums[0] += torch.clamp(values, max=0, out=part).sum()
            sums[1] += torch.clamp(values, min=0, out=part).sum()
            sums[2] += torch.lt(values, 0, out=part).sum(dtype=torch.float32)

        pack_signs(flat, data[_HEADER:], add)
        counts = torch.stack([sums[2], flat.numel() - sums[2]])
        means = torch.where(counts > 0, sums[:2] / counts.clamp(min=1), 0.0)
        if not bool(means.isfinite().all()):
            means.fill_(torch.nan)
        data[:_HEADER] = as_bytes(means.to(torch.float32))
        return Payload(data, shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        negative, positive = view_as(payload.data[:_HEADER], torch.float32)
        result = torch.empty(payload.elements, dtype=payload.dtype, device=payload.data.device)
        signs_to_values(payload.data[_HEADER:], negative, positive, result)
        return result
