"""Long tensors encoded in pieces that stay in the processor's cache, short ones together.

Codecs work on matrices: each row is a tensor, and all have the same length. A single tensor is a
matrix of one row, and a long one is cut into pieces of columns. Several rows are never cut, since
`rows_at_once` limits them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from ddltrace.experiments.lazy_torch import torch

_ELEMENTS_PER_THREAD: Final = 1 << 18
"""1 MiB of float32: few enough calls, and the buffers of a codec stay in the cache (measured with
benchmarks/codecs.py: 2 ** 16 elements are slower by a third, 2 ** 19 no faster for all codecs)."""

_ELEMENTS_ON_A_DEVICE: Final = 1 << 24
_PACKED_TOGETHER: Final = 8
_kept: Final = threading.local()


def chunk_elements(
    rows: int, elements: int, device: torch.device, block: int = 1, unit: int = 1
) -> int:
    """Columns that are encoded at once.

    Args:
        rows: Number of rows.
        elements: Number of elements of each row.
        device: Device of the tensor.
        block: Elements that share a scale; chunks are multiples of it.
        unit: A chunk that is followed by another is also a multiple of this many elements.

    Returns:
        A multiple of 8 and of `block`: all columns of several rows or on a device, which has no
        cache worth the extra launches, else as many of a row as the threads' caches hold.
    """
    whole = rounded_up(elements, math.lcm(block, _PACKED_TOGETHER))
    if device.type != "cpu" or rows > 1:
        return whole
    step = math.lcm(block, unit, _PACKED_TOGETHER)
    wanted = _ELEMENTS_PER_THREAD * torch.get_num_threads()
    return min(whole, max(1, wanted // step) * step)


def rows_at_once(elements: int, device: torch.device, *, same_everywhere: bool = False) -> int:
    """Number of rows that are encoded or decoded together: at least one.

    Args:
        elements: Number of elements of each row, at least one.
        device: Device of the rows.
        same_everywhere: Whether the number must not depend on this rank's number of threads.
    """
    if device.type != "cpu":
        return max(1, _ELEMENTS_ON_A_DEVICE // elements)
    threads = 1 if same_everywhere else torch.get_num_threads()
    return max(1, _ELEMENTS_PER_THREAD * threads // elements)


def rounded_up(elements: int, multiple: int = _PACKED_TOGETHER) -> int:
    """The next multiple of a number."""
    return -(-elements // multiple) * multiple


def float_chunks(
    rows: torch.Tensor, chunk: int, block: int = 1
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The pieces of rows as float32, in one buffer that is used again for each.

    Args:
        rows: Rows x floating elements.
        chunk: Columns at once, from `chunk_elements`.
        block: Elements that share a scale.

    Yields:
        First column and last (exclusive) of the piece, and a contiguous matrix of its elements.
        Its number of columns is rounded up to a multiple of 8 and of `block` with zeros.
    """
    count, elements = rows.shape
    buffer = scratch("values", count * chunk, rows.device)
    for start in range(0, elements, chunk):
        stop = min(start + chunk, elements)
        width = rounded_up(stop - start, math.lcm(block, _PACKED_TOGETHER))
        values = buffer[: count * width].view(count, width)
        if stop - start == width:
            values.copy_(rows[:, start:stop])
        else:
            values[:, : stop - start].copy_(rows[:, start:stop])
            values[:, stop - start :].zero_()
        yield start, stop, values


def decoded_chunks(
    data: torch.Tensor, elements: int, chunk: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Columns to decode pieces into, in one buffer that is used again for each.

    Args:
        data: Payloads x bytes.
        elements: Number of elements of each payload.
        chunk: Columns at once, from `chunk_elements`.

    Yields:
        First column and last (exclusive) of the piece, and payloads x `chunk` of arbitrary
        contents: float32.
    """
    work = scratch("decoded", len(data) * chunk, data.device).view(len(data), chunk)
    for start in range(0, elements, chunk):
        yield start, min(start + chunk, elements), work


def added(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """The float64 sum of what was found in each piece.

    Args:
        sums: One float32 tensor for each piece, all of the same shape.
    """
    if len(sums) == 1:
        return sums[0].double()
    return torch.stack(list(sums)).sum(0, dtype=torch.float64)


def scratch(
    use: Literal["values", "noise", "exact", "decoded", "halfway"],
    elements: int,
    device: torch.device,
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


def fit_sums(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums <x, r> and <r, r> over the last dimension.

    Args:
        exact: float32, of a size at which squares neither vanish nor overflow. Overwritten.
        rounded: The rounded values, same shape.
    """
    shape = exact.shape[:-1]
    if shape.numel() == 1:  # faster for one long row
        one, other = exact.view(-1), rounded.view(-1)
        return torch.dot(one, other).view(shape), torch.dot(other, other).view(shape)
    product = exact.mul_(rounded).sum(-1)
    norm: torch.Tensor = torch.linalg.vector_norm(rounded, dim=-1)
    return product, norm.square_()


def fitted_factor(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The least-squares factor <x, r> / <r, r> over the last dimension.

    Args:
        exact: As for `fit_sums`. Overwritten.
        rounded: The rounded values, same shape.

    Returns:
        One factor for each row; 0 for a row of zeros.
    """
    product, square = fit_sums(exact, rounded)
    return torch.where(square == 0, 0.0, product / square)
