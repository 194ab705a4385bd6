"""The sign of each element as one packed bit, which is 1 for zero."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ddltrace.experiments.codecs.description import packed_bytes
from ddltrace.experiments.codecs.kernels.bits import pack, unpack
from ddltrace.experiments.codecs.kernels.chunks import chunk_elements, float_chunks, scratch

_TABLE_PAYS = 1 << 14
"""Minimum number of elements for which a table of the values of all bytes is faster."""


def pack_signs(
    rows: torch.Tensor,
    out: torch.Tensor,
    observe: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Packs the signs of tensors, and passes their elements to a function.

    Args:
        rows: Floating, rows x elements, at least one of each.
        out: Rows x ceil(n / 8) bytes that are filled; bit i of a row is 1 where element i >= 0.
        observe: Called with each piece of columns as float32, which it may change, and with a
            matrix that is 1 where an element is positive and else 0.
    """
    count, elements = rows.shape
    chunk = chunk_elements(count, elements, rows.device)
    for start, stop, values in float_chunks(rows, chunk):
        signs = scratch("noise", values.numel(), rows.device).view(values.shape)
        torch.ge(values, 0, out=signs)
        if rows.dtype == torch.float64:  # small negative numbers are zero in float32
            signs[:, : stop - start] = rows[:, start:stop] >= 0
        packed = pack(signs.to(torch.int8).view(-1).view(torch.uint8), 1).view(count, -1)
        first, last = start // 8, packed_bytes(stop, 1)
        out[:, first:last] = packed[:, : last - first]
        observe(values[:, : stop - start], signs[:, : stop - start])


def signs_to_values(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    """Fills tensors with one of two values by the sign's bit.

    Args:
        packed: From `pack_signs`: rows x bytes.
        negative: The value of bit 0 for each row: float32.
        positive: The value of bit 1 for each row.
        result: The rows to fill, contiguous.
    """
    if result.numel() < _TABLE_PAYS:
        _fill_by_mask(packed, negative, positive, result)
    elif len(result) > 1:
        _fill_by_products(packed, negative, positive, result)
    else:
        _fill_from_table(packed.view(-1), negative, positive, result.view(-1))


def _fill_by_mask(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    # Few operations: on tensors this small, the calls cost more than the arithmetic.
    places = packed.to(torch.int32).view(-1)
    ones = _bits_of_bytes(packed.device).index_select(0, places).view(torch.bool)
    ones = ones.view(packed.shape[0], -1)[:, : result.shape[1]]
    negative, positive = negative.to(result.dtype), positive.to(result.dtype)
    torch.where(ones, positive.unsqueeze(1), negative.unsqueeze(1), out=result)


def _fill_by_products(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    # A product with 0 or 1 is exact, and several times as fast as a choice between two columns.
    places = packed.to(torch.int32).view(-1)
    table = _bits_of_bytes(packed.device).view(torch.bool).view(-1, 8).float()
    signs = scratch("noise", 8 * places.numel(), packed.device)
    torch.index_select(table, 0, places, out=signs.view(-1, 8))
    signs = signs.view(packed.shape[0], -1)
    values = scratch("decoded", signs.numel(), packed.device).view(signs.shape)
    torch.mul(signs, positive.unsqueeze(1), out=values)
    values.addcmul_(signs.sub_(1.0), negative.unsqueeze(1), value=-1.0)
    result.copy_(values[:, : result.shape[1]])


def _fill_from_table(
    packed: torch.Tensor, negative: torch.Tensor, positive: torch.Tensor, result: torch.Tensor
) -> None:
    # Eight values at once, looked up by the byte of their signs.
    ones = _bits_of_bytes(packed.device).view(torch.bool).view(-1, 8)
    table = torch.where(ones, positive, negative).to(result.dtype)
    chunk = chunk_elements(1, result.numel(), result.device)
    whole = result.numel() // 8 * 8
    for start in range(0, whole, chunk):
        stop = min(start + chunk, whole)
        places = packed[start // 8 : stop // 8].to(torch.int32)
        torch.index_select(table, 0, places, out=result[start:stop].view(-1, 8))
    if whole < result.numel():
        rest = packed[whole // 8 :].unsqueeze(0)
        _fill_by_mask(rest, negative, positive, result[whole:].unsqueeze(0))


@functools.cache
def _bits_of_bytes(device: torch.device) -> torch.Tensor:
    """For each byte an int64 whose byte i is bit i: 256 elements."""
    every = torch.arange(256, device=device).to(torch.uint8)
    return unpack(every, 1, 8 * 256).view(torch.int64)
