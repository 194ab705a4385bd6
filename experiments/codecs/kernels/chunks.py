"""Long tensors encoded in pieces that stay in the processor's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_ELEMENTS_PER_THREAD = 1 << 16  # 256 KiB of float32: two or three such buffers fit in L2
_PACKED_TOGETHER = 8


def chunk_elements(flat: torch.Tensor, alignment: int = 1) -> int:
    """Elements that are encoded at once.

    Args:
        flat: What is encoded.
        alignment: Chunks are multiples of this many elements.

    Returns:
        A multiple of 8 and of `alignment`: all of a device's tensor, which has no cache worth
        the extra launches, or as much of a host's as its threads' caches hold.
    """
    unit = math.lcm(alignment, _PACKED_TOGETHER)
    whole = -(-flat.numel() // unit) * unit
    if flat.device.type != "cpu":
        return whole
    wanted = _ELEMENTS_PER_THREAD * torch.get_num_threads()
    return min(whole, max(1, wanted // unit) * unit)


def float_chunks(flat: torch.Tensor, chunk: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The pieces of a tensor as float32, in one buffer that is used again for each.

    Args:
        flat: Floating elements.
        chunk: Elements at once.

    Yields:
        Start and stop (exclusive) of the piece, and a buffer of `chunk` elements (of fewer
        for the last piece, rounded up to a multiple of 8) whose rest is zero.
    """
    buffer = torch.empty(chunk, dtype=torch.float32, device=flat.device)
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        buffer[: stop - start].copy_(flat[start:stop])
        if stop - start < chunk:
            buffer[stop - start :].zero_()
        yield start, stop, buffer
