"""TernGrad: Wen et al., NeurIPS 2017, arXiv 1705.07878."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddltrace.experiments.codecs.chunks import (
    added,
    chunk_elements,
    decoded_chunks,
    fit_sums,
    float_chunks,
    rows_at_once,
    scratch,
)
from ddltrace.experiments.codecs.codec import (
    ChunkedCodec,
    Codec,
    CodecDescription,
    as_bytes,
    check_encodable,
    finite_or_nan,
    floats_at_start,
    packed_bytes,
)
from ddltrace.experiments.codecs.packing import PackedLevels, unit_elements
from ddltrace.experiments.codecs.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique


@technique(
    "volume",
    "ternary",
    "random rounding to -1, 0 or 1 times one scale of all ranks",
    "TernGrad, arXiv 1705.07878",
)
@dataclass(frozen=True)
class Ternary(CodecDescription):
    """Each element -1, 0 or 1 times one scale, at random, without bias for the clipped tensor.

    Attributes:
        clip: Elements are clipped at this many standard deviations first; 0 clips nothing. A
            tensor whose elements are all equal is never clipped.
    """

    clip: float = 2.5

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ValueError("clip must be 0 or a positive number")

    def codec(self, seed: int | None) -> Codec:
        """Rounding at random."""
        return TernaryCodec(self, RandomBits(seed))

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Two bits an element and one float32 scale."""
        return 4 + packed_bytes(elements, 2) if elements else 0

    @property
    def second_pass(self) -> CodecDescription:
        """Without clipping: averages of few values have outliers that are not noise."""
        return replace(self, clip=0.0)


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

    def __init__(self, description: Ternary, random: RandomBits, *, fitted: bool = False) -> None:
        super().__init__(description)
        self._clip = description.clip
        self._random = random
        self._fitted = fitted

    def with_feedback(self) -> Codec:
        """The rank's own scale, fitted to what was drawn."""
        assert isinstance(self.description, Ternary)
        return TernaryCodec(self.description, self._random, fitted=True)

    def scales_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each row after clipping: its own scale.

        Args:
            rows: Floating, at least one row and one column.

        Returns:
            float32, one number for each row; NaN if an element is infinite or NaN.
        """
        at_once = rows_at_once(rows.shape[1], rows.device)
        parts = [self._scales(part) for part in torch.split(rows.detach(), at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.float64:
            rows = rows.float()
        largest = _largest(rows)
        if self._clip and rows.shape[1] > 1:
            deviation = _deviations(rows)
            # Of a row that is not finite the deviation is NaN, so it is never clipped.
            limit = torch.where(deviation > 0, self._clip * deviation, largest)
            largest = torch.minimum(largest, limit)
        return finite_or_nan(largest.float())

    def encode_rows_scaled(
        self, rows: torch.Tensor, own: torch.Tensor, scales: torch.Tensor
    ) -> list[torch.Tensor]:
        """Encodes tensors of equal length with the scales that all ranks share.

        Args:
            rows: One flat tensor in each row.
            own: Their `scales_of`.
            scales: The largest of all ranks.

        Returns:
            The bytes of each row's payload.
        """
        check_encodable(rows)
        at_once = rows_at_once(rows.shape[1], rows.device)
        groups = zip(
            *(torch.split(each, at_once) for each in (rows.detach(), own, scales)), strict=True
        )
        return [data for group in groups for data in self._encode_with(*group).unbind()]

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes all rows together, each with its own scale."""
        return self._encode_with(rows, None, self._scales(rows))

    def _encode_with(
        self, rows: torch.Tensor, own: torch.Tensor | None, scale: torch.Tensor
    ) -> torch.Tensor:
        count, elements = rows.shape
        data = self._empty_payloads(rows)
        levels = PackedLevels(data[:, _HEADER:], elements, _BITS)
        factor = (1.0 / scale).nan_to_num_(0.0, posinf=0.0)
        limit = None if own is None else (own * factor).nan_to_num_(0.0).unsqueeze(1)
        finite = math.isfinite(float(scale.sum()))
        factor = factor.unsqueeze(1)
        sums = []
        for start, stop, values in float_chunks(
            rows, chunk_elements(count, elements, rows.device, unit=unit_elements())
        ):
            noise = scratch("noise", values.numel(), rows.device).view(values.shape)
            exact = noise
            if self._fitted:
                exact = scratch("exact", values.numel(), rows.device).view(values.shape)
            scaled = torch.mul(values, factor, out=exact)
            if limit is None:  # then the scale is the largest magnitude
                torch.clamp(scaled, -1.0, 1.0, out=values)
            else:  # faster than a clamp to columns
                torch.minimum(scaled, limit, out=values)
                torch.maximum(values, -limit, out=values)
            values.add_(1.0 + OFFSET)
            round_at_random(values, noise, self._random)
            values.clamp_(0, 2)
            if not finite:
                values.nan_to_num_(1.0)
            if self._fitted:
                drawn = torch.sub(values.floor_(), 1.0, out=noise)
                sums.append(torch.stack(fit_sums(scaled, drawn)))
            levels.write(start, stop, values)
        if self._fitted:
            product, square = added(sums)
            scale = torch.where(square == 0, scale, scale * (product / square)).float()
        data[:, :_HEADER] = as_bytes(scale.unsqueeze(1))
        return data

    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        scale = floats_at_start(data, 1)
        levels = PackedLevels(data[:, _HEADER:], elements, _BITS)
        chunk = chunk_elements(len(data), elements, data.device, unit=unit_elements())
        for start, stop, work in decoded_chunks(data, elements, chunk):
            levels.read(start, stop, work)
            yield start, stop, work[:, : stop - start].sub_(1.0).mul_(scale)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row."""
    if rows.shape[0] == 1:
        smallest, largest = torch.aminmax(rows)  # several times as fast as along a dimension
        return torch.maximum(largest, -smallest).view(1)
    return torch.maximum(rows.amax(1), -rows.amin(1))


def _deviations(rows: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each row: float32, or float64 for such elements."""
    mean = rows.mean(1)
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    square = norm.square_().div_(rows.shape[1])
    variance = square - mean.square_()
    low, high = _SQUARES_HOLD
    # Exact enough unless the difference cancels, or squares vanish or overflow.
    exact = (square > low) & (square < high) & (variance > 0.1 * square)
    if bool(exact.all()):
        return variance.sqrt_()
    return torch.where(exact, variance.sqrt_(), rows.std(1, correction=0))
