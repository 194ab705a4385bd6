"""8-bit floats with a scale a block (Micikevicius et al., arXiv 2209.05433)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ddltrace.experiments.codecs.block_int8 import BlockCodec, Blocks
from ddltrace.experiments.codecs.codec import Codec
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0}

_ALL_BUT_BIT_14: Final = -16385
"""The sign of the shifted byte stands in bit 15, and once more in bit 14, which is cleared."""


@technique(
    "volume",
    "fp8",
    "8-bit floats and a scale a block, two quantizations",
    "FP8 Formats for Deep Learning, arXiv 2209.05433",
)
@dataclass(frozen=True)
class Fp8(Blocks):
    """The codes are 8-bit floats.

    Attributes:
        form: ``e4m3`` has 4 significant bits and magnitudes from 2^-9 to 448, ``e5m2`` has 3 and
            magnitudes from 2^-16 to 57344. The scale makes the largest magnitude of a block the
            largest number of the form.
    """

    form: Literal["e4m3", "e5m2"] = "e4m3"

    def codec(self, seed: int | None) -> Codec:
        """Rounding to the nearest, to the even one of two."""
        if self.form == "e4m3":
            return _E4m3Codec(self, _LARGEST[self.form], torch.float8_e4m3fn)
        return BlockCodec(self, _LARGEST[self.form], torch.float8_e5m2)


class _E4m3Codec(BlockCodec):
    """Converts e4m3 by way of float16, which PyTorch converts faster on a processor."""

    def _read(
        self, data: torch.Tensor, count: int, start: int, stop: int, out: torch.Tensor
    ) -> None:
        if data.device.type != "cpu":
            super()._read(data, count, start, stop, out)
            return
        # Sign, exponent and fraction go where float16 has them; its exponent's bias is larger by 8.
        bits = data[:, start:stop].view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
        bits.bitwise_and_(_ALL_BUT_BIT_14)
        out[:, : stop - start].copy_(bits.view(torch.float16)).mul_(256.0)
