"""Casts to 16 bits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, as_bytes, view_as


class HalfPrecisionCodec(Codec):
    """Rounds to the nearest 16-bit float. Infinities and NaN are preserved."""

    def __init__(self, description: CodecDescription, name: Literal["float16", "bfloat16"]) -> None:
        super().__init__(description)
        self.dtype: torch.dtype = getattr(torch, name)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        half = flat.to(self.dtype)
        if half.data_ptr() == flat.data_ptr():  # it was of this type: payloads share nothing
            half = half.clone()
        return Payload(as_bytes(half), shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        half = view_as(payload.data, self.dtype)
        return half.clone() if payload.dtype == self.dtype else half.to(payload.dtype)
