"""QSGD: Alistarh et al., NeurIPS 2017, arXiv 1610.02132, section 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddltrace.experiments.codecs.chunks import (
    chunk_elements,
    decoded_chunks,
    fitted_factor,
    float_chunks,
    rounded_up,
    scratch,
)
from ddltrace.experiments.codecs.codec import (
    ChunkedCodec,
    Codec,
    CodecDescription,
    as_bytes,
    floats_at_start,
    packed_bytes,
)
from ddltrace.experiments.codecs.packing import PackedLevels, unit_elements
from ddltrace.experiments.codecs.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

_MAX_LEVELS = (1 << 15) - 1


@technique(
    "volume",
    "qsgd",
    "random rounding to s levels of a bucket's norm",
    "QSGD, arXiv 1610.02132",
)
@dataclass(frozen=True)
class Qsgd(CodecDescription):
    """Elements rounded at random to `s` levels of their bucket's norm, without bias.

    Attributes:
        s: Levels on each side of zero.
        bucket: Elements that share one Euclidean norm.
    """

    s: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.s <= _MAX_LEVELS:
            raise ValueError(f"s must be between 1 and {_MAX_LEVELS}")
        if not 8 <= self.bucket <= 1 << 20:
            raise ValueError("bucket must be between 8 and 1048576 elements")

    @property
    def bits(self) -> int:
        """Bits of one code: a sign and one of s + 1 levels."""
        return 1 + self.s.bit_length()

    @property
    def alignment(self) -> int:
        """A shard is a number of whole buckets."""
        return self.bucket

    def codec(self, seed: int | None) -> Codec:
        """Rounding at random."""
        return QsgdCodec(self, RandomBits(seed))

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """The packed codes and one float32 norm a bucket."""
        return 4 * -(-elements // self.bucket) + packed_bytes(elements, self.bits)


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

    def __init__(self, description: Qsgd, random: RandomBits, *, fitted: bool = False) -> None:
        super().__init__(description)
        self._s, self._bucket, self._bits = description.s, description.bucket, description.bits
        self._random = random
        self._fitted = fitted

    def with_feedback(self) -> Codec:
        """Norms fitted to what was drawn."""
        assert isinstance(self.description, Qsgd)
        return QsgdCodec(self.description, self._random, fitted=True)

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all buckets of a chunk together."""
        count, elements = rows.shape
        device = rows.device
        data = self._empty_payloads(rows)
        bucket, buckets, unit = self._geometry(elements)
        levels = PackedLevels(data[:, 4 * buckets :], elements, self._bits, unit)
        chunk = chunk_elements(count, elements, device, bucket, unit)
        for start, stop, values in float_chunks(rows, chunk, bucket):
            first, last = start // bucket, -(-stop // bucket)
            part = values[:, : (last - first) * bucket].view(count, -1, bucket)
            norm, all_finite = _norms(part)
            scale = (self._s / norm).nan_to_num_(0.0, posinf=0.0).unsqueeze(2)
            exact = scratch("exact" if self._fitted else "noise", part.numel(), device)
            scaled = torch.mul(part, scale, out=exact.view(part.shape))
            # A sign and a level become one number from 0 to 2 s.
            torch.add(scaled, self._s + OFFSET, out=part)
            codes = values[:, : rounded_up(stop - start)]
            noise = scratch("noise", codes.numel(), device).view(codes.shape)
            round_at_random(codes, noise, self._random)
            codes.clamp_(0, 2 * self._s)
            if not all_finite:  # NaN would spread to the codes in the same byte
                codes.nan_to_num_(0.0)
            if self._fitted:
                drawn = scratch("noise", part.numel(), device).view(part.shape)
                torch.sub(part.floor_(), self._s, out=drawn)
                norm.mul_(fitted_factor(scaled, drawn))
            data[:, 4 * first : 4 * last] = as_bytes(norm)
            levels.write(start, stop, codes)
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        count = data.shape[0]
        bucket, buckets, unit = self._geometry(elements)
        steps = floats_at_start(data, buckets).div(self._s).unsqueeze(2)
        levels = PackedLevels(data[:, 4 * buckets :], elements, self._bits, unit)
        chunk = chunk_elements(count, elements, data.device, bucket, unit)
        for start, stop, work in decoded_chunks(data, elements, chunk):
            first, last = start // bucket, -(-stop // bucket)
            levels.read(start, stop, work)
            used = work[:, : (last - first) * bucket]
            used.sub_(self._s).view(count, -1, bucket).mul_(steps[:, first:last])
            yield start, stop, work[:, : stop - start]

    def _geometry(self, elements: int) -> tuple[int, int, int]:
        """Elements of a bucket, number of buckets, and the unit of the codes' layout."""
        bucket = min(self._bucket, rounded_up(elements))
        return bucket, -(-elements // bucket), unit_elements(self._bucket)


def _norms(rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The Euclidean norms over the last dimension, and whether all elements are finite.

    The norm of a row with an infinite or NaN element is NaN.
    """
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    low, high = _SQUARES_HOLD
    least, most = torch.aminmax(norms)
    if low < float(least) and float(most) < high:
        return norms, True
    norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).to(torch.float32)
    bad = ~norms.isfinite()
    return norms.masked_fill_(bad, torch.nan), not bool(bad.any())
