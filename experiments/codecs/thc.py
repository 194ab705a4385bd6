"""THC: tensors encoded so that sums need no decoding (Li et al., NSDI 2024, arXiv 2302.08545).

This is its uniform form, without truncation: the levels reach from the smallest to the largest
element of all ranks, so the mean is unbiased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ddltrace.experiments.codecs.chunks import rows_at_once, scratch
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

    def transformed(
        self, rows: torch.Tensor, block: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The transformed elements of the rows of a matrix, and the largest of each block.

        Args:
            rows: Floating, at least one row and one column.
            block: Elements of a block; by default that of tensors of this length.

        Returns:
            Blocks of all rows x elements of a block, float32, and the largest magnitude of each
            block: infinite where an element is not finite.
        """
        elements = rows.shape[1]
        block = block or self._of.blocks(elements)[1]
        blocks = -(-elements // block)
        if elements < blocks * block:
            rows = torch.nn.functional.pad(rows, (0, blocks * block - elements))
        whole = rows.reshape(-1, block)
        values = torch.empty_like(whole, dtype=torch.float32)
        ranges = values.new_empty(len(values))
        signs = random_signs(block, rows.device)
        at_once = rows_at_once(block, rows.device)
        parts = (torch.split(each, at_once) for each in (whole, values, ranges))
        for given, part, largest in zip(*parts, strict=True):
            transform(torch.mul(given, signs, out=part), part)
            noise = scratch("noise", part.numel(), part.device).view(part.shape)
            torch.amax(torch.abs(part, out=noise), 1, out=largest)
        return values, ranges.nan_to_num_(torch.inf, torch.inf)

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
        scales = (most / 2 / ranges).nan_to_num_(0.0, posinf=0.0).unsqueeze(1)
        codes = torch.empty_like(transformed, dtype=torch.uint8)
        at_once = rows_at_once(transformed.shape[1], transformed.device)
        for part, scale, code in zip(
            *(torch.split(each, at_once) for each in (transformed, scales, codes)), strict=True
        ):
            part.mul_(scale).nan_to_num_(0.0, 0.0, 0.0).add_(most / 2 + OFFSET)
            noise = scratch("noise", part.numel(), part.device).view(part.shape)
            round_at_random(part, noise, self._random)
            # To 16 bits and on to 8 is faster, and rounds down as well.
            code.copy_(part.clamp_(0, most).to(torch.int16))
        return codes

    def mean(
        self, sums: torch.Tensor, ranges: torch.Tensor, ranks: int, result: torch.Tensor
    ) -> None:
        """The mean of the ranks' tensors.

        Args:
            sums: The sums of their codes.
            ranges: As in `codes`.
            ranks: Number of ranks.
            result: The rows of a matrix, to be filled: one row, or several short ones.
        """
        count = len(result)
        most, block = levels(ranks), sums.shape[1]
        signs = random_signs(block, sums.device)
        factors = torch.where(ranges.isinf(), torch.nan, ranges) / (most * ranks * block)
        at_once = rows_at_once(block, sums.device) if count == 1 else len(sums)
        parts = (torch.split(sums, at_once), torch.split(factors.unsqueeze(1), at_once))
        for number, (part, factor) in enumerate(zip(*parts, strict=True)):
            codes = scratch("noise", part.numel(), part.device).view(part.shape).copy_(part)
            # Whole numbers: the transform is exact, and equal on all ranks.
            values = transform(codes.mul_(2).sub_(most * ranks)).mul_(signs).mul_(factor)
            start = number * at_once * block
            piece = result[:, start : start + part.numel() // count]
            piece.copy_(values.view(count, -1)[:, : piece.shape[1]])

    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes with the ranges of the rows themselves."""
        count, elements = rows.shape
        data = self._empty_payloads(rows)
        blocks, block = self._of.blocks(elements)
        codes = data[:, 4 * blocks :]
        chunk = block * (rows_at_once(block, rows.device) if count == 1 else blocks)
        for start in range(0, elements, chunk):
            values, ranges = self.transformed(rows[:, start : start + chunk], block)
            first, part = start // block, ranges.view(count, -1)
            data[:, 4 * first : 4 * (first + part.shape[1])] = as_bytes(part)
            found = self.codes(values, ranges, 1).view(count, -1)
            codes[:, start : start + found.shape[1]] = found
        return data

    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        blocks, block = self._of.blocks(result.shape[1])
        ranges = floats_at_start(data, blocks).view(-1)
        self.mean(data[:, 4 * blocks :].reshape(-1, block), ranges, 1, result)


def levels(ranks: int) -> int:
    """The largest code of each of some ranks.

    Raises:
        ValueError: There are too many ranks for one byte.
    """
    if ranks > _MOST:
        raise ValueError(f"thc sums codes in one byte, which holds those of {_MOST} ranks at most")
    return _MOST // ranks
