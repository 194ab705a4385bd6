"""TernGrad's stochastic quantizer."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, as_bytes, view_as
from ddltrace.experiments.codecs.kernels.fitted import FittedCodec
from ddltrace.experiments.codecs.kernels.levels import PackedLevels
from ddltrace.experiments.codecs.kernels.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.codecs.ternary import Ternary

_HEADER = 4
_BITS = 2


class TernaryCodec(Codec):
    """Rounds each clipped element to 0 or to plus or minus the scale at random.

    A tensor of zeros decodes to zeros. A tensor with an infinite or NaN element decodes to NaN
    as a whole.
    """

    def __init__(self, description: Ternary, *, seed: int | None) -> None:
        super().__init__(description)
        self._clip = description.clip
        self._random = RandomBits(seed)

    def with_feedback(self) -> Codec:
        """The rank's own scale, fitted to what was drawn."""
        return FittedCodec(self, None)

    def scale_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest magnitude after clipping: the tensor's own scale.

        Args:
            tensor: Floating, at least one element.

        Returns:
            float32 without dimensions; NaN if an element is infinite or NaN.
        """
        flat = tensor.detach().reshape(-1)
        if flat.dtype != torch.float64:
            flat = flat.float()
        smallest, largest = torch.aminmax(flat)
        largest = torch.maximum(largest, -smallest)
        if self._clip and flat.numel() > 1:
            deviation = flat.std(correction=0)
            limit = torch.where(deviation > 0, self._clip * deviation, largest)
            # NaN does not come through a minimum on every device.
            largest = torch.where(largest.isfinite(), torch.minimum(largest, limit), torch.nan)
        scale = largest.float()
        return torch.where(scale.isfinite(), scale, torch.nan)

    def encode_scaled(self, tensor: torch.Tensor, scale: torch.Tensor) -> Payload:
        """Encodes with the scale that all ranks share.

        Args:
            tensor: Floating and dense, at least one element.
            scale: Their largest `scale_of`.
        """
        flat = tensor.detach().reshape(-1)
        return self._encode_with(flat, tuple(tensor.shape), self.scale_of(flat), scale)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        scale = self.scale_of(flat)
        return self._encode_with(flat, shape, scale, scale)

    def _encode_with(
        self, flat: torch.Tensor, shape: tuple[int, ...], own: torch.Tensor, scale: torch.Tensor
    ) -> Payload:
        size = self.description.wire_bytes(flat.numel())
        data = torch.empty(size, dtype=torch.uint8, device=flat.device)
        data[:_HEADER] = as_bytes(scale.reshape(1))
        levels = PackedLevels(data[_HEADER:], flat.numel(), _BITS)
        factor = (1.0 / scale).nan_to_num(0.0, posinf=0.0)
        limit = float((own * factor).nan_to_num(0.0))
        chunk = chunk_elements(flat)
        noise = torch.empty(chunk, dtype=torch.float32, device=flat.device)
        for start, stop, values in float_chunks(flat, chunk):
            values.mul_(factor).clamp_(-limit, limit).add_(1.0 + OFFSET)
            round_at_random(values, noise, self._random)
            values.clamp_(0, 2).nan_to_num_(1.0)
            levels.write(start, stop, values)
        return Payload(data, shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        data, elements = payload.data, payload.elements
        scale = view_as(data[:_HEADER], torch.float32)[0]
        levels = PackedLevels(data[_HEADER:], elements, _BITS)
        result = torch.empty(elements, dtype=payload.dtype, device=data.device)
        chunk = chunk_elements(result)
        work = torch.empty(chunk, dtype=torch.float32, device=data.device)
        for start in range(0, elements, chunk):
            stop = min(start + chunk, elements)
            levels.read(start, stop, work)
            work.sub_(1.0).mul_(scale)
            result[start:stop] = work[: stop - start]
        return result
