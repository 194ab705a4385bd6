"""Gradients sent in 16 bits, summed in 16 bits.

The same arithmetic as ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``: cast,
divide by the number of ranks, all-reduce, cast back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    as_bytes,
    view_as,
)
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique


class HalfPrecision(CodecDescription):
    """16-bit floats.

    Attributes:
        kind: Their element type in `torch`.
    """

    kind: ClassVar[Literal["float16", "bfloat16"]]

    def codec(self, seed: int | None) -> Codec:
        """A cast."""
        return HalfPrecisionCodec(self)

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Two bytes an element."""
        return 2 * elements

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Sums of halves are halves: an all-reduce of half the bytes."""
        return "all_reduce"


@technique(
    "volume",
    "fp16",
    "16-bit floats, summed in 16 bits",
    "PyTorch's fp16_compress_hook",
)
@dataclass(frozen=True)
class Fp16(HalfPrecision):
    """IEEE half precision: 11 significant bits, values above 65,504 become infinite."""

    kind: ClassVar[Literal["float16", "bfloat16"]] = "float16"


@technique(
    "volume",
    "bf16",
    "bfloat16, summed in bfloat16",
    "PyTorch's bf16_compress_hook",
)
@dataclass(frozen=True)
class Bf16(HalfPrecision):
    """bfloat16: 8 significant bits, the range of float32."""

    kind: ClassVar[Literal["float16", "bfloat16"]] = "bfloat16"


class HalfPrecisionCodec(Codec):
    """Rounds to the nearest 16-bit float. Infinities and NaN are preserved."""

    def __init__(self, description: HalfPrecision) -> None:
        super().__init__(description)
        self.dtype: torch.dtype = getattr(torch, description.kind)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        half = flat.to(self.dtype)
        if half.data_ptr() == flat.data_ptr():  # it was of this type: payloads share nothing
            half = half.clone()
        return Payload(as_bytes(half), shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        half = view_as(payload.data, self.dtype)
        return half.clone() if payload.dtype == self.dtype else half.to(payload.dtype)
