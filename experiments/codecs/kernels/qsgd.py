"""QSGD's stochastic quantizer."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, view_as
from ddltrace.experiments.codecs.kernels.fitted import FittedCodec
from ddltrace.experiments.codecs.kernels.levels import PackedLevels
from ddltrace.experiments.codecs.kernels.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.codecs.qsgd import Qsgd

_SQUARES_HOLD = (1e-15, 1e15)
"""Norms between which the squares of float32 elements neither vanish nor overflow."""


class QsgdCodec(Codec):
    """Rounds to two neighbours of s levels at random, so that the expectation is the element.

    A bucket of zeros decodes to zeros. A bucket with an infinite or NaN element decodes to NaN
    as a whole.
    """

    def __init__(self, description: Qsgd, *, seed: int | None) -> None:
        super().__init__(description)
        self._s, self._bucket, self._bits = description.s, description.bucket, description.bits
        self._random = RandomBits(seed)

    def with_feedback(self) -> Codec:
        """Norms fitted to what was drawn."""
        return FittedCodec(self, self._bucket)

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        elements, bucket = flat.numel(), self._bucket
        buckets = -(-elements // bucket)
        size = self.description.wire_bytes(elements)
        data = torch.empty(size, dtype=torch.uint8, device=flat.device)
        norms = data[: 4 * buckets].view(torch.float32)
        levels = PackedLevels(data[4 * buckets :], elements, self._bits)
        chunk = chunk_elements(flat, bucket)
        noise = torch.empty(chunk, dtype=torch.float32, device=flat.device)
        for start, stop, values in float_chunks(flat, chunk):
            rows = -(-(stop - start) // bucket)
            part = values[: rows * bucket].view(rows, bucket)
            norm = _norms(part)
            norms[start // bucket : start // bucket + rows] = norm
            scale = (self._s / norm).nan_to_num_(0.0, posinf=0.0).unsqueeze(1)
            # A sign and a level become one number from 0 to 2 s.
            part.mul_(scale).add_(self._s + OFFSET)
            padded = -(-(stop - start) // 8) * 8
            round_at_random(values[:padded], noise[:padded], self._random)
            values[:padded].clamp_(0, 2 * self._s)
            levels.write(start, stop, values[:padded])
        return Payload(data, shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        elements, bucket = payload.elements, self._bucket
        buckets = -(-elements // bucket)
        data = payload.data
        steps = view_as(data[: 4 * buckets], torch.float32) / self._s
        levels = PackedLevels(data[4 * buckets :], elements, self._bits)
        result = torch.empty(elements, dtype=payload.dtype, device=data.device)
        chunk = chunk_elements(result, bucket)
        work = torch.zeros(chunk, dtype=torch.float32, device=data.device)
        for start in range(0, elements, chunk):
            stop = min(start + chunk, elements)
            rows = -(-(stop - start) // bucket)
            levels.read(start, stop, work)
            step = steps[start // bucket : start // bucket + rows].unsqueeze(1)
            work[: rows * bucket].sub_(self._s).view(rows, bucket).mul_(step)
            result[start:stop] = work[: stop - start]
        return result


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each row; NaN where an element is infinite or NaN."""
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    low, high = _SQUARES_HOLD
    if not bool(((norms > low) & (norms < high)).all()):
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).to(torch.float32)
        norms.masked_fill_(~norms.isfinite(), torch.nan)
    return norms
