"""THC: tensors encoded so that sums need no decoding (Li et al., NSDI 2024, arXiv 2302.08545).

This is its uniform form, without truncation: the levels reach from the smallest to the largest
element of all ranks, so the mean is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.codecs.chunks import scratch
from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    RowCodec,
    as_bytes,
    floats_at_start,
)
from ddltrace.experiments.codecs.hadamard import random_signs, size_for, transform
from ddltrace.experiments.codecs.random_bits import OFFSET, RandomBits, round_at_random
from ddltrace.experiments.lazy_torch import torch
from ddltrace.experiments.technique import technique

_MOST: Final = 255
"""The largest number in a byte: sums of codes do not exceed it."""


@technique(
    "volume",
    "thc",
    "levels that all ranks share, so that sums are made of encoded tensors",
    "THC, arXiv 2302.08545",
)
@dataclass(frozen=True)
class Thc(CodecDescription):
    """A byte an element, after a random Hadamard transform; the ranks share each block's levels.

    Each rank's code is at most 255 / p of p ranks, so that a sum of all fits in a byte.

    Attributes:
        block: Elements that are transformed together and share levels, a power of two.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if self.block & (self.block - 1) or not 8 <= self.block <= 4096:
            raise ValueError("block must be a power of two between 8 and 4096")

    @property
    def alignment(self) -> int:
        """A shard is a number of whole blocks."""
        return self.block

    def codec(self, seed: int | None) -> Codec:
        """Rounding at random."""
        return ThcCodec(self, RandomBits(seed))

    def blocks(self, elements: int) -> tuple[int, int]:
        """Number of blocks of a tensor, and elements of each.

        Args:
            elements: Number of elements of the tensor, at least one.
        """
        block = max(2, size_for(elements, self.block))
        return -(-elements // block), block

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """One byte an element of whole blocks and four a block."""
        if not elements:
            return 0
        blocks, block = self.blocks(elements)
        return blocks * (4 + block)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """Sums of codes are the code of the sum."""
        return "all_reduce"


class ThcCodec(RowCodec):
    """Rounds the transformed elements of a block at random to levels from -m to m.

    A block with an infinite or NaN element decodes to NaN as a whole.
    """

    def __init__(self, description: Thc, random: RandomBits) -> None:
        super().__init__(description)
        self._of = description
        self._random = random

    def transformed(self, rows: torch.Tensor) -> torch.Tensor:
        """The transformed elements of the rows of a matrix.

        Args:
            rows: Floating, at least one row and one column.

        Returns:
            Blocks of all rows x elements of a block, float32; the next call uses its memory again.
        """
        count, elements = rows.shape
        blocks, block = self._of.blocks(elements)
        values = rows.new_zeros(count, blocks * block, dtype=torch.float32)
        values[:, :elements] = rows
        signed = values.view(-1, block).mul_(random_signs(block, rows.device))
        return transform(signed)

    @staticmethod
    def ranges(transformed: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each block; infinite where an element is not finite."""
        return transformed.abs().amax(1).nan_to_num_(torch.inf, torch.inf)

    def codes(self, transformed: torch.Tensor, ranges: torch.Tensor, ranks: int) -> torch.Tensor:
        """Rounds each element at random to one of its two neighbouring levels.

        Args:
            transformed: From `transformed`; changed.
            ranges: The largest magnitude of each block on all ranks.
            ranks: Number of ranks.

        Returns:
            The codes, uint8, in the shape of `transformed`: 0 for -range, 255 // ranks for range.
        """
        most = levels(ranks)
        # Where the range is zero or infinite, it decides alone what is decoded: any code will do.
        scale = (most / 2 / ranges).nan_to_num_(0.0, posinf=0.0).unsqueeze(1)
        transformed.mul_(scale).nan_to_num_(0.0, 0.0, 0.0).add_(most / 2 + OFFSET)
        noise = scratch("noise", transformed.numel(), transformed.device).view(transformed.shape)
        round_at_random(transformed, noise, self._random)
        return transformed.clamp_(0, most).to(torch.uint8)

    def mean(
        self, sums: torch.Tensor, ranges: torch.Tensor, ranks: int, rows: int, elements: int
    ) -> torch.Tensor:
        """The mean of the ranks' tensors.

        Args:
            sums: The sums of their codes.
            ranges: As in `codes`.
            ranks: Number of ranks.
            rows: Number of tensors.
            elements: Number of elements of each.

        Returns:
            Rows x elements, float32.
        """
        most, block = levels(ranks), sums.shape[1]
        # Whole numbers: the transform is exact, and equal on all ranks.
        values = transform(sums.float().mul_(2).sub_(most * ranks))
        values.mul_(random_signs(block, sums.device))
        factor = torch.where(ranges.isinf(), torch.nan, ranges) / (most * ranks * block)
        return values.mul_(factor.unsqueeze(1)).view(rows, -1)[:, :elements]

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes with the ranges of the rows themselves."""
        count = len(rows)
        data = self._empty_payloads(rows)
        values = self.transformed(rows)
        ranges = self.ranges(values)
        head = 4 * len(ranges) // count
        data[:, :head] = as_bytes(ranges.view(count, -1))
        data[:, head:] = self.codes(values, ranges, 1).view(count, -1)
        return data

    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        count, elements = result.shape
        blocks, block = self._of.blocks(elements)
        ranges = floats_at_start(data, blocks).view(-1)
        sums = data[:, 4 * blocks :].reshape(-1, block)
        result.copy_(self.mean(sums, ranges, 1, count, elements))


def levels(ranks: int) -> int:
    """The largest code of each of some ranks.

    Raises:
        ValueError: There are too many ranks for one byte.
    """
    if ranks > _MOST:
        raise ValueError(f"thc sums codes in one byte, which holds those of {_MOST} ranks at most")
    return _MOST // ranks
