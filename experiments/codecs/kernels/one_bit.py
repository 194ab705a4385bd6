"""1-bit SGD's quantizer."""

from __future__ import annotations

import torch

from ddltrace.experiments.codecs.kernels.chunks import added, scratch
from ddltrace.experiments.codecs.kernels.codec import as_bytes, finite_or_nan, floats_at_start
from ddltrace.experiments.codecs.kernels.row_codec import RowCodec
from ddltrace.experiments.codecs.kernels.signs import pack_signs, signs_to_values

_HEADER = 8


class OneBitCodec(RowCodec):
    """One bit an element, and the mean of the negative and of the other elements.

    A tensor with an infinite or NaN element decodes to NaN as a whole.
    """

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Packs the signs of all rows together."""
        elements = rows.shape[1]
        data = self._empty_payloads(rows)
        sums: list[torch.Tensor] = []

        def add(values: torch.Tensor, signs: torch.Tensor) -> None:
            part = scratch("exact", values.numel(), values.device).view(values.shape)
            negative = torch.clamp(values, max=0, out=part).sum(1)
            positive = torch.clamp(values, min=0, out=part).sum(1)
            sums.append(torch.stack([negative, positive, signs.sum(1)], 1))

        pack_signs(rows, data[:, _HEADER:], add)
        total = added(sums)
        positives = total[:, 2:]
        counts = torch.cat([elements - positives, positives], 1)
        means = total[:, :2].div_(counts.clamp_(min=1))  # the sum of no elements is zero
        means.add_(means.sum(1, keepdim=True).mul_(0))  # NaN if one of them is not finite
        data[:, :_HEADER] = as_bytes(finite_or_nan(means).to(torch.float32))
        return data

    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        negative, positive = floats_at_start(data, 2).unbind(1)
        signs_to_values(data[:, _HEADER:], negative, positive, result)
