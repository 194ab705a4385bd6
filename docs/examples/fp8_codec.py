"""A codec of one's own: 8-bit floats with one scale for each tensor.

ddltrace run --plugin docs/examples/fp8_codec.py --strategy tensor_fp8 -- torchrun train.py
"""

from dataclasses import dataclass

import torch

from ddltrace.experiments.codecs import Codec, CodecDescription, Payload
from ddltrace.experiments.technique import technique


@technique("volume", "tensor_fp8", "8-bit floats with one scale a tensor", "FP8, arXiv 2209.05433")
@dataclass(frozen=True)
class Fp8(CodecDescription):
    def wire_bytes(self, elements: int, element_bytes: int = 4):
        return elements + 4

    def exchange(self, elements: int, world_size: int):
        return "all_gather"

    def codec(self, seed: int | None):
        return Fp8Codec(self)


class Fp8Codec(Codec):
    def _encode(self, flat, shape, key):
        scale = (flat.abs().max() / 448).float().clamp_min(1e-30)
        data = torch.cat(
            [
                scale.view(1).view(torch.uint8),
                (flat / scale).to(torch.float8_e4m3fn).view(torch.uint8),
            ]
        )
        return Payload(data, shape, flat.dtype)

    def _decode(self, payload):
        scale = payload.data[:4].clone().view(torch.float32)
        return (payload.data[4:].view(torch.float8_e4m3fn).float() * scale).to(payload.dtype)
