"""Signs with one scale."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, as_bytes, is_finite, view_as
from ddltrace.experiments.codecs.kernels.signs import pack_signs, signs_to_values

_HEADER = 4


class SignSgdCodec(Codec):
    """One bit an element. The scale is 1, or the mean magnitude below a residual.

    A tensor with an infinite or NaN element decodes to NaN as a whole: its scale is NaN.

    Attributes:
        votes: Whether payloads are votes, of which the exchange takes the majority.
    """

    def __init__(self, description: CodecDescription, *, scaled: bool = False) -> None:
        super().__init__(description)
        self.votes = not scaled

    def with_feedback(self) -> Codec:
        """EF-signSGD's form: signs scaled by the mean magnitude."""
        return SignSgdCodec(self.description, scaled=True)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        size = self.description.wire_bytes(flat.numel())
        data = torch.empty(size, dtype=torch.uint8, device=flat.device)
        total = torch.zeros((), dtype=torch.float64, device=flat.device)

        def add(values: torch.Tensor) -> None:
            if not self.votes:
                total.add_(values.abs_().sum())
            elif not is_finite(values):
                total.fill_(torch.nan)

        pack_signs(flat, data[_HEADER:], add)
        scale = 1.0 + total if self.votes else total / flat.numel()
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        data[:_HEADER] = as_bytes(scale.to(torch.float32).reshape(1))
        return Payload(data, shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        scale = view_as(payload.data[:_HEADER], torch.float32)[0]
        result = torch.empty(payload.elements, dtype=payload.dtype, device=payload.data.device)
        signs_to_values(payload.data[_HEADER:], -scale, scale, result)
        return result
