"""1-bit SGD: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.chunks import added, scratch
from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    RowCodec,
    as_bytes,
    finite_or_nan,
    floats_at_start,
    packed_bytes,
)
from ddltrace.experiments.codecs.packing import pack_signs, signs_to_values
from ddltrace.experiments.lazy_torch import torch
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

    def codec(self, seed: int | None) -> Codec:
        """Signs and their means."""
        return OneBitCodec(self)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One bit an element and two float32 means."""
        return 8 + packed_bytes(elements, 1) if elements else 0


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
