"""QSGD's stochastic quantizer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

import torch

from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks, scratch
from ddltrace.experiments.codecs.kernels.codec import ChunkedCodec, Codec, Payload, view_as
from ddltrace.experiments.codecs.kernels.fit import fitted_factor
from ddltrace.experiments.codecs.kernels.levels import PackedLevels, unit_elements
from ddltrace.experiments.codecs.kernels.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.codecs.qsgd import Qsgd

_SQUARES_HOLD = (1e-15, 1e15)
"""Norms between which the squares of float32 elements neither vanish nor overflow."""


class QsgdCodec(ChunkedCodec):
    """Rounds to two neighbours of s levels at random, so that the expectation is the element.

    A bucket of zeros decodes to zeros. A bucket with an infinite or NaN element decodes to NaN
    as a whole.

    Unbiased rounding to few levels has an error larger than the tensor itself, so residuals
    would grow without bound. Below a residual the norm of each bucket g is therefore multiplied
    by the least-squares factor <g, Q(g)> / <Q(g), Q(g)>: then the error is at most g, which is
    what error feedback needs (Karimireddy et al., arXiv 1901.09847, assumption A).
    """

    def __init__(self, description: Qsgd, *, seed: int | None, fitted: bool = False) -> None:
        super().__init__(description)
        self._s, self._bucket, self._bits = description.s, description.bucket, description.bits
        self._random = RandomBits(seed)
        self._fitted = fitted

    def with_feedback(self) -> Codec:
        """Norms fitted to what was drawn."""
        assert isinstance(self.description, Qsgd)
        codec = QsgdCodec(self.description, seed=0, fitted=True)
        codec._random = self._random
        return codec

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        elements, bucket = flat.numel(), self._bucket
        buckets = -(-elements // bucket)
        size = self.description.wire_bytes(elements)
        data = torch.empty(size, dtype=torch.uint8, device=flat.device)
        norms = data[: 4 * buckets].view(torch.float32)
        unit = unit_elements(bucket)
        levels = PackedLevels(data[4 * buckets :], elements, self._bits, unit)
        chunk = chunk_elements(flat.numel(), flat.device, math.lcm(bucket, unit))
        noise = scratch("noise", chunk, flat.device)
        exact = scratch("exact", chunk, flat.device) if self._fitted else noise
        for start, stop, values in float_chunks(flat, chunk):
            rows = -(-(stop - start) // bucket)
            part = values[: rows * bucket].view(rows, bucket)
            norm, all_finite = _norms(part)
            norms[start // bucket : start // bucket + rows] = norm
            scale = (self._s / norm).nan_to_num_(0.0, posinf=0.0).unsqueeze(1)
            scaled = torch.mul(part, scale, out=exact[: part.numel()].view_as(part))
            # A sign and a level become one number from 0 to 2 s.
            torch.add(scaled, self._s + OFFSET, out=part)
            padded = -(-(stop - start) // 8) * 8
            round_at_random(values[:padded], noise[:padded], self._random)
            values[:padded].clamp_(0, 2 * self._s)
            if not all_finite:  # NaN would spread to the codes in the same byte
                values[:padded].nan_to_num_(0.0)
            if self._fitted:
                drawn = torch.sub(part.floor_(), self._s, out=noise[: part.numel()].view_as(part))
                factor = fitted_factor(scaled, drawn)
                norms[start // bucket : start // bucket + rows].mul_(factor)
            levels.write(start, stop, values[:padded])
        return Payload(data, shape, flat.dtype)

    def _pieces(self, payload: Payload) -> Iterator[tuple[int, int, torch.Tensor]]:
        elements, bucket = payload.elements, self._bucket
        buckets = -(-elements // bucket)
        data = payload.data
        steps = view_as(data[: 4 * buckets], torch.float32) / self._s
        unit = unit_elements(bucket)
        levels = PackedLevels(data[4 * buckets :], elements, self._bits, unit)
        chunk = chunk_elements(elements, data.device, math.lcm(bucket, unit))
        work = scratch("decoded", chunk, data.device)
        for start in range(0, elements, chunk):
            stop = min(start + chunk, elements)
            rows = -(-(stop - start) // bucket)
            levels.read(start, stop, work)
            step = steps[start // bucket : start // bucket + rows].unsqueeze(1)
            work[: rows * bucket].sub_(self._s).view(rows, bucket).mul_(step)
            yield start, stop, work[: stop - start]


def _norms(rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The Euclidean norm of each row, and whether all elements are finite.

    The norm of a row with an infinite or NaN element is NaN.
    """
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    low, high = _SQUARES_HOLD
    least, most = torch.aminmax(norms)
    if low < float(least) and float(most) < high:
        return norms, True
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).to(torch.float32)
    bad = ~norms.isfinite()
    return norms.masked_fill_(bad, torch.nan), not bool(bad.any())
