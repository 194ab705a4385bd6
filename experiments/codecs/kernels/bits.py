"""Codes of a few bits packed into bytes, and back, eight codes at a time in one 64-bit word.

Code i of a group of eight occupies bits i b to (i + 1) b of the group's b bytes, least
significant first. Words are read as little-endian, as on every processor that PyTorch supports.
"""

from __future__ import annotations

from typing import Final

import torch

_LANES: Final = ((8, torch.int16), (16, torch.int32), (32, torch.int64))
"""Bits of a half lane, and the element type of a whole one."""

_WHOLE_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Element type that holds one packed group of eight codes, where there is one."""

_GATHER_BITS: Final = sum(1 << (56 - 7 * place) for place in range(8))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes.

    Args:
        codes: uint8, flat, a multiple of 8 of them, each below 2 ** bits. Overwritten.
        bits: 1 to 8.

    Returns:
        ``len(codes) * bits / 8`` bytes, uint8.
    """
    if bits == 8:
        return codes
    if bits == 1:
        # The product's highest byte holds bit i of every byte i, moved there by 56 - 7 i.
        words = codes.view(torch.int64).mul_(_GATHER_BITS).bitwise_right_shift_(56)
        return words.to(torch.int8).view(torch.uint8)
    for half, dtype in _LANES:
        width = bits * half // 8  # of what lies in each half lane by now
        low = (1 << width) - 1
        lanes = codes.view(dtype)
        upper = torch.bitwise_right_shift(lanes, half - width)
        upper.bitwise_and_(low << width)
        lanes.bitwise_and_(low).bitwise_or_(upper)
    if bits in _WHOLE_WORDS:
        return codes.view(torch.int64).to(_WHOLE_WORDS[bits]).view(torch.uint8)
    return codes.view(-1, 8)[:, :bits].reshape(-1)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Undoes `pack`.

    Args:
        packed: uint8, flat; the last group may be cut off behind its last code.
        bits: 1 to 8.
        count: Codes to return, a multiple of 8; those behind the packed ones are zero.

    Returns:
        The codes, uint8.
    """
    size = count * bits // 8
    if packed.numel() < size:
        packed = torch.cat([packed, packed.new_zeros(size - packed.numel())])
    if bits == 8:
        return packed[:size].clone()
    if bits in _WHOLE_WORDS:
        words = _words(packed[:size], _WHOLE_WORDS[bits])
    else:
        groups = torch.zeros(count // 8, 8, dtype=torch.uint8, device=packed.device)
        groups[:, :bits] = packed[:size].view(-1, bits)
        words = groups.view(torch.int64).view(-1)
    codes = words.view(torch.uint8)
    for half, dtype in reversed(_LANES):
        width = bits * half // 8
        low = (1 << width) - 1
        lanes = codes.view(dtype)
        upper = torch.bitwise_left_shift(lanes, half - width)
        upper.bitwise_and_(low << half)
        lanes.bitwise_and_(low).bitwise_or_(upper)
    return codes


def _words(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if packed.storage_offset() % dtype.itemsize or packed.data_ptr() % dtype.itemsize:
        packed = packed.clone()
    return packed.view(dtype).to(torch.int64)
