"""TernGrad's stochastic quantizer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

import torch

from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks, scratch
from ddltrace.experiments.codecs.kernels.codec import (
    ChunkedCodec,
    Codec,
    Payload,
    as_bytes,
    view_as,
)
from ddltrace.experiments.codecs.kernels.levels import PackedLevels, unit_elements
from ddltrace.experiments.codecs.kernels.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.codecs.ternary import Ternary

_HEADER = 4
_BITS = 2
_SQUARES_HOLD = (1e-20, 1e30)
"""Mean squares between which squares of float32 elements neither vanish nor overflow."""


class TernaryCodec(ChunkedCodec):
    """Rounds each clipped element to 0 or to plus or minus the scale at random.

    A tensor of zeros decodes to zeros. A tensor with an infinite or NaN element decodes to NaN
    as a whole. Below a residual the scale is multiplied by the least-squares factor of what was
    drawn, for the reason that `QsgdCodec` gives.
    """

    def __init__(self, description: Ternary, *, seed: int | None, fitted: bool = False) -> None:
        super().__init__(description)
        self._clip = description.clip
        self._random = RandomBits(seed)
        self._fitted = fitted

    def with_feedback(self) -> Codec:
        """The rank's own scale, fitted to what was drawn."""
        assert isinstance(self.description, Ternary)
        codec = TernaryCodec(self.description, seed=0, fitted=True)
        codec._random = self._random
        return codec

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
            deviation = _deviation(flat)
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
        levels = PackedLevels(data[_HEADER:], flat.numel(), _BITS)
        factor = (1.0 / scale).nan_to_num(0.0, posinf=0.0)
        limit = float((own * factor).nan_to_num(0.0))
        finite = math.isfinite(float(scale))
        chunk = chunk_elements(flat.numel(), flat.device, unit_elements())
        noise = scratch("noise", chunk, flat.device)
        exact = scratch("exact", chunk, flat.device) if self._fitted else noise
        sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
        for start, stop, values in float_chunks(flat, chunk):
            size = values.numel()
            scaled = torch.mul(values, factor, out=exact[:size])
            torch.clamp(scaled, -limit, limit, out=values).add_(1.0 + OFFSET)
            round_at_random(values, noise[:size], self._random)
            values.clamp_(0, 2)
            if not finite:
                values.nan_to_num_(1.0)
            if self._fitted:
                drawn = torch.sub(values.floor_(), 1.0, out=noise[:size])
                sums[0] += torch.dot(scaled, drawn)
                sums[1] += torch.dot(drawn, drawn)
            levels.write(start, stop, values)
        if self._fitted:
            scale = torch.where(sums[1] == 0, scale, scale * (sums[0] / sums[1])).float()
        data[:_HEADER] = as_bytes(scale.reshape(1))
        return Payload(data, shape, flat.dtype)

    def _pieces(self, payload: Payload) -> Iterator[tuple[int, int, torch.Tensor]]:
        data, elements = payload.data, payload.elements
        scale = view_as(data[:_HEADER], torch.float32)[0]
        levels = PackedLevels(data[_HEADER:], elements, _BITS)
        chunk = chunk_elements(elements, data.device, unit_elements())
        work = scratch("decoded", chunk, data.device)
        for start in range(0, elements, chunk):
            stop = min(start + chunk, elements)
            levels.read(start, stop, work)
            work.sub_(1.0).mul_(scale)
            yield start, stop, work[: stop - start]


def _deviation(flat: torch.Tensor) -> torch.Tensor:
    """The standard deviation: float32, or float64 for such elements."""
    mean = flat.mean()
    norm: torch.Tensor = torch.linalg.vector_norm(flat)
    square = norm.square() / flat.numel()
    variance = square - mean.square()
    low, high = _SQUARES_HOLD
    # Exact enough unless the difference cancels, or squares vanish or overflow.
    if low < float(square) < high and float(variance) > 0.1 * float(square):
        return variance.sqrt()
    return flat.std(correction=0)
