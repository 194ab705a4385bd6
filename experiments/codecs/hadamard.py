"""The Walsh-Hadamard transform, which spreads large elements over their neighbours."""

from __future__ import annotations

import functools

from ddltrace.experiments.codecs.chunks import scratch
from ddltrace.experiments.lazy_torch import torch


def size_for(elements: int, size: int) -> int:
    """The size of the transform for a tensor: no larger than the next power of two.

    Args:
        elements: Number of elements of the tensor, at least one.
        size: The size for long tensors, a power of two.
    """
    return min(size, 1 << (elements - 1).bit_length())


def transform(values: torch.Tensor) -> torch.Tensor:
    """The transform of the last dimension; twice, it is a multiplication by the dimension.

    Of whole numbers whose sums are below 2^24 it is exact, so equal on all ranks.

    Args:
        values: float32; the last dimension is a power of two.

    Returns:
        A tensor of this shape, whose memory the next call of this thread uses again.
    """
    out = scratch("exact", values.numel(), values.device).view(values.shape)
    return torch.matmul(values, _matrix(values.shape[-1], values.device), out=out)


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
