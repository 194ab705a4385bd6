"""Codes of a few bits, levels and signs packed into bytes, and back.

Code i of a group of eight occupies bits i b to (i + 1) b of the group's b bytes, least
significant first, in one 64-bit word. Words are read as little-endian, as on every processor that
PyTorch supports.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

from ddltrace.experiments.codecs.chunks import chunk_elements, float_chunks, scratch
from ddltrace.experiments.codecs.codec import packed_bytes
from ddltrace.experiments.lazy_torch import torch

_GATHER_BITS: Final = sum(1 << (56 - 7 * place) for place in range(8))


@functools.cache
def _lanes() -> tuple[tuple[int, torch.dtype], ...]:
    """Bits of a half lane, and the element type of a whole one."""
    return ((8, torch.int16), (16, torch.int32), (32, torch.int64))


@functools.cache
def _whole_words() -> dict[int, torch.dtype]:
    """Element type that holds one packed group of eight codes, by the bits of a code."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32}


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
    for half, dtype in _lanes():
        width = bits * half // 8  # of what lies in each half lane by now
        low = (1 << width) - 1
        lanes = codes.view(dtype)
        upper = torch.bitwise_right_shift(lanes, half - width)
        upper.bitwise_and_(low << width)
        lanes.bitwise_and_(low).bitwise_or_(upper)
    if bits in _whole_words():
        return codes.view(torch.int64).to(_whole_words()[bits]).view(torch.uint8)
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
    if bits in _whole_words():
        words = _words(packed[:size], _whole_words()[bits])
    else:
        groups = torch.zeros(count // 8, 8, dtype=torch.uint8, device=packed.device)
        groups[:, :bits] = packed[:size].view(-1, bits)
        words = groups.view(torch.int64).view(-1)
    codes = words.view(torch.uint8)
    for half, dtype in reversed(_lanes()):
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


_BYTE: Final = 8
_UNIT: Final = 4096
"""Codes whose bytes are put together from stretches of codes, where a code has 2 or 4 bits."""


def unit_elements(group: int = _UNIT) -> int:
    """Elements of which a chunk that is written or read at once has to be a multiple.

    Args:
        group: Elements that share a scale.

    Returns:
        The unit; 8 where the groups and the unit do not divide each other.
    """
    return _UNIT if _UNIT % group == 0 or group % _UNIT == 0 else _BYTE


class PackedLevels:
    """Codes of one tensor, or of each row of a matrix.

    A plane of up to 8 bits and one of what is above them lie behind each other. In a plane of 2
    or 4 bits every whole unit of codes is cut into 4 or 2 stretches, and byte i holds code i of
    each: that needs no shuffling of bits. Other planes, and the codes behind the last whole unit,
    hold neighbouring codes in a byte.
    """

    def __init__(self, data: torch.Tensor, elements: int, bits: int, unit: int = _UNIT) -> None:
        """Takes the bytes of the codes.

        Args:
            data: ``ceil(elements * bits / 8)`` bytes, uint8; rows of that many for a matrix.
            elements: Number of codes of the tensor, or of each row.
            bits: 1 to 16.
            unit: From `unit_elements`: codes are written and read in pieces that start at its
                multiples, with the same unit.
        """
        self._low_bits, self._high_bits = min(bits, _BYTE), max(0, bits - _BYTE)
        border = packed_bytes(elements, self._low_bits)
        self._low, self._high = data[..., :border], data[..., border:]
        self._stretches = _BYTE // bits if bits in (2, 4) and unit == _UNIT else 0

    def write(self, start: int, stop: int, codes: torch.Tensor) -> None:
        """Stores the codes from `start` to `stop`.

        Args:
            start: A multiple of the unit.
            stop: Exclusive.
            codes: Their values: float32, not negative; a fraction is dropped. A multiple of 8
                in each row, zeros behind `stop`. Changed.
        """
        if self._stretches:
            whole = (stop - start) // _UNIT * _UNIT
            if whole:
                self._write_units(start, codes[..., :whole])
            start, codes = start + whole, codes[..., whole:]
            if start == stop:
                return
        if not self._high_bits:
            # Floats go to 16 bits and on to 8 faster, and safely: 8 bits of a float have a sign.
            low = codes.to(torch.int16).to(torch.uint8)
        else:
            words = codes.to(torch.int32)
            _store(self._high, start, stop, self._high_bits, (words >> _BYTE).to(torch.uint8))
            low = words.bitwise_and_(0xFF).to(torch.uint8)
        _store(self._low, start, stop, self._low_bits, low)

    def read(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fetches the codes from `start` to `stop`.

        Args:
            start: A multiple of the unit.
            stop: Exclusive.
            out: float32, ``stop - start`` elements in each row, rounded up to a multiple of 8.
        """
        if self._stretches:
            whole = (stop - start) // _UNIT * _UNIT
            if whole:
                self._read_units(start, out[..., :whole])
            start, out = start + whole, out[..., whole:]
            if start == stop:
                return
        count = -(-(stop - start) // 8) * 8
        low = _load(self._low, start, stop, self._low_bits, count)
        out[..., :count].copy_(low)
        if self._high_bits:
            high = _load(self._high, start, stop, self._high_bits, count)
            out[..., :count].add_(high, alpha=1 << _BYTE)

    def _write_units(self, start: int, codes: torch.Tensor) -> None:
        # In float32 the bytes are exact: they are below 2 ** 8.
        first, *others = _units(codes.floor_(), _UNIT).chunk(self._stretches, -1)
        for number, stretch in enumerate(others, 1):
            first.add_(stretch, alpha=1 << (number * self._low_bits))
        packed = first.to(torch.int16).flatten(-2)
        begin = start // self._stretches
        self._low[..., begin : begin + packed.shape[-1]] = packed

    def _read_units(self, start: int, out: torch.Tensor) -> None:
        stretches = _units(out, _UNIT).chunk(self._stretches, -1)
        begin = start // self._stretches
        packed = self._low[..., begin : begin + out.shape[-1] // self._stretches]
        packed = _units(packed, _UNIT // self._stretches)
        for number, stretch in enumerate(stretches):
            shifted = packed.bitwise_right_shift(number * self._low_bits) if number else packed
            last = number == self._stretches - 1
            stretch.copy_(shifted if last else shifted.bitwise_and((1 << self._low_bits) - 1))


def _units(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    return tensor.view(*tensor.shape[:-1], -1, unit)


def _store(plane: torch.Tensor, start: int, stop: int, bits: int, codes: torch.Tensor) -> None:
    first, last = start * bits // 8, packed_bytes(stop, bits)
    packed = pack(codes.view(-1), bits).view(*codes.shape[:-1], -1)
    plane[..., first:last] = packed[..., : last - first]


def _load(plane: torch.Tensor, start: int, stop: int, bits: int, count: int) -> torch.Tensor:
    packed = plane[..., start * bits // 8 : packed_bytes(stop, bits)]
    rows = packed.shape[:-1]
    missing = count * bits // 8 - packed.shape[-1]
    if missing:
        packed = torch.nn.functional.pad(packed, (0, missing))
    return unpack(packed.reshape(-1), bits, math.prod(rows) * count).view(*rows, count)


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
