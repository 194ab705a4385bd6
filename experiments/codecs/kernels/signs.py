"""The sign of each element as one packed bit; zero counts as positive."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddltrace.experiments.codecs.description import packed_bytes
from ddltrace.experiments.codecs.kernels.bits import pack
from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks, scratch

_TABLE_PAYS = 1 << 14
"""Minimum number of elements for which a table of all bytes is faster."""

_BITS_OF_A_BYTE = tuple(1 << place for place in range(8))


def pack_signs(
    flat: torch.Tensor,
    out: torch.Tensor,
    observe: Callable[[torch.Tensor], None],
) -> None:
    """Packs the signs of a tensor, and passes its elements to a function.

    Args:
        flat: Floating elements, at least one.
        out: ceil(n / 8) bytes that are filled; bit i of the whole is 1 where element i >= 0.
        observe: Called with each piece of the elements as float32; may change it.
    """
    chunk = chunk_elements(flat.numel(), flat.device)
    signs = scratch("noise", chunk, flat.device)
    for start, stop, values in float_chunks(flat, chunk):
        torch.ge(values, 0, out=signs)
        if flat.dtype == torch.float64:  # small negative numbers are zero in float32
            signs[: stop - start] = flat[start:stop] >= 0
        packed = pack(signs.to(torch.int8).view(torch.uint8), 1)
        first, last = start // 8, packed_bytes(stop, 1)
        out[first:last] = packed[: last - first]
        observe(values[: stop - start])


def signs_to_values(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    """Fills a tensor with one of two values by the sign's bit.

    Args:
        packed: From `pack_signs`.
        negative: The value of bit 0: float32, no dimensions.
        positive: The value of bit 1.
        result: The tensor to fill, flat.
    """
    if result.numel() < _TABLE_PAYS:
        _fill_from_bits(packed, negative, positive, result)
        return
    # Eight values at once, looked up by the byte of their signs.
    places = torch.arange(8, device=packed.device)
    ones = (torch.arange(256, device=packed.device).unsqueeze(1) >> places) & 1
    table = torch.where(ones.bool(), positive, negative).to(result.dtype)
    chunk = chunk_elements(result.numel(), result.device)
    whole = result.numel() // 8 * 8
    for start in range(0, whole, chunk):
        stop = min(start + chunk, whole)
        rows = packed[start // 8 : stop // 8].to(torch.int32)
        torch.index_select(table, 0, rows, out=result[start:stop].view(-1, 8))
    if whole < result.numel():
        _fill_from_bits(packed[whole // 8 :], negative, positive, result[whole:])


def _fill_from_bits(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    # Few operations: on tensors this small, the calls cost more than the arithmetic.
    places = torch.tensor(_BITS_OF_A_BYTE, dtype=torch.uint8, device=packed.device)
    ones = packed.unsqueeze(1).bitwise_and(places).ne(0).view(-1)[: result.numel()]
    result.copy_(torch.where(ones, positive, negative))
