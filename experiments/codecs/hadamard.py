"""The Walsh-Hadamard transform, which spreads large elements over their neighbours."""

from __future__ import annotations

import functools
from typing import Final

from ddltrace.experiments.codecs.chunks import scratch
from ddltrace.experiments.lazy_torch import torch

_AT_ONCE: Final = 32
"""Largest size that is transformed by one product; larger ones are faster in two."""


def size_for(elements: int, size: int) -> int:
    """The size of the transform for a tensor: no larger than the next power of two.

    Args:
        elements: Number of elements of the tensor, at least one.
        size: The size for long tensors, a power of two.
    """
    return min(size, 1 << (elements - 1).bit_length())


def transform(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The transform of the last dimension; twice, it is a multiplication by the dimension.

    Of whole numbers whose sums are below 2^24 it is exact, so equal on all ranks. With TF32, which
    a job may choose for products on a GPU, it is not, and ranks on equal GPUs are equal.

    Args:
        values: float32, contiguous or blocks of contiguous rows; the last dimension is a power of
            two.
        out: Contiguous, of this shape, to be filled; may be `values`. By default memory that the
            next call of this thread uses again.

    Returns:
        The filled tensor.
    """
    size, device = values.shape[-1], values.device
    if out is None:
        out = scratch("exact", values.numel(), device).view(values.shape)
    if size <= _AT_ONCE:
        if out is values:
            values = scratch("halfway", values.numel(), device).view(values.shape).copy_(values)
        return torch.matmul(values, _matrix(size, device), out=out)
    # The matrix is the Kronecker product of two smaller ones: far fewer operations.
    right = 1 << (size.bit_length() // 2)
    rows = scratch("halfway", values.numel(), device).view(-1, right)
    torch.matmul(values.reshape(-1, right), _matrix(right, device), out=rows)
    left = size // right
    blocks = out.view(-1, left, right)
    return torch.matmul(_matrix(left, device), rows.view(blocks.shape), out=blocks).view(
        values.shape
    )


@functools.cache
def _matrix(size: int, device: torch.device) -> torch.Tensor:
    """Sylvester's construction: symmetric, entries 1 and -1."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@functools.cache
def random_signs(size: int, device: torch.device) -> torch.Tensor:
    """Signs drawn once, the same in all processes: they make a random transform of it."""
    generator = torch.Generator().manual_seed(size)
    signs = torch.randint(0, 2, (size,), generator=generator).float()
    return signs.mul_(2).sub_(1).to(device)
