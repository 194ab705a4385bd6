"""Long tensors encoded in pieces that stay in the processor's cache."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Final, Literal

import torch

_ELEMENTS_PER_THREAD: Final = 1 << 18
"""1 MiB of float32: few enough calls, and the buffers of a codec stay in the cache (measured with
benchmarks/codecs.py: 2 ** 16 elements are slower by a third, 2 ** 19 no faster for all codecs)."""

_PACKED_TOGETHER: Final = 8
_kept: Final = threading.local()


def chunk_elements(elements: int, device: torch.device, alignment: int = 1) -> int:
    """Elements that are encoded at once.

    Args:
        elements: Number of elements of the tensor that is encoded.
        device: Device of the tensor.
        alignment: Chunks are multiples of this many elements.

    Returns:
        A multiple of 8 and of `alignment`: all of a device's tensor, which has no cache worth
        the extra launches, or as much of a host's as its threads' caches hold.
    """
    unit = math.lcm(alignment, _PACKED_TOGETHER)
    whole = -(-elements // unit) * unit
    if device.type != "cpu":
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
    buffer = scratch("values", chunk, flat.device)
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        buffer[: stop - start].copy_(flat[start:stop])
        if stop - start < chunk:
            buffer[stop - start :].zero_()
        yield start, stop, buffer


def scratch(
    use: Literal["values", "noise", "exact", "decoded"], elements: int, device: torch.device
) -> torch.Tensor:
    """A buffer of arbitrary contents for one chunk.

    On the host it is the same memory at the next call of this thread for the same use: memory
    that the process has just got from the system costs more than the arithmetic on it.

    Args:
        use: Purpose of the buffer.
        elements: Its size.
        device: Device of the tensor.

    Returns:
        float32, flat.
    """
    if device.type != "cpu":
        return torch.empty(elements, dtype=torch.float32, device=device)
    buffers: dict[str, torch.Tensor] = _kept.__dict__
    buffer = buffers.get(use)
    if buffer is None or buffer.numel() < elements:
        buffer = buffers[use] = torch.empty(elements, dtype=torch.float32)
    return buffer[:elements]
