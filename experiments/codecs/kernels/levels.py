"""Packs integers of 1 to 16 bits into planes of bits."""

from __future__ import annotations

import math
from typing import Final

import torch

from ddltrace.experiments.codecs.description import packed_bytes
from ddltrace.experiments.codecs.kernels.bits import pack, unpack

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
