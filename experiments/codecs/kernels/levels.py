"""Whole numbers of 1 to 16 bits as packed planes of bits."""

from __future__ import annotations

import torch

from ddltrace.experiments.codecs.description import packed_bytes
from ddltrace.experiments.codecs.kernels.bits import pack, unpack

_BYTE = 8


class PackedLevels:
    """Codes of one tensor: a plane of up to 8 bits, and one of what is above them.

    The planes lie behind each other; codes are written and read in pieces that start at
    multiples of 8.
    """

    def __init__(self, data: torch.Tensor, elements: int, bits: int) -> None:
        """Takes the bytes of the codes.

        Args:
            data: ``ceil(elements * bits / 8)`` bytes, uint8, flat.
            elements: Number of codes.
            bits: 1 to 16.
        """
        self._low_bits, self._high_bits = min(bits, _BYTE), max(0, bits - _BYTE)
        border = packed_bytes(elements, self._low_bits)
        self._low, self._high = data[:border], data[border:]

    def write(self, start: int, stop: int, codes: torch.Tensor) -> None:
        """Stores the codes from `start` to `stop`.

        Args:
            start: A multiple of 8.
            stop: Exclusive.
            codes: Their values: float32, whole numbers; a multiple of 8, zeros behind `stop`.
        """
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
            start: A multiple of 8.
            stop: Exclusive.
            out: float32, ``stop - start`` elements, rounded up to a multiple of 8.
        """
        count = -(-(stop - start) // 8) * 8
        low = _load(self._low, start, stop, self._low_bits, count)
        out[:count].copy_(low)
        if self._high_bits:
            high = _load(self._high, start, stop, self._high_bits, count)
            out[:count].add_(high, alpha=1 << _BYTE)


def _store(plane: torch.Tensor, start: int, stop: int, bits: int, codes: torch.Tensor) -> None:
    first, last = start * bits // 8, packed_bytes(stop, bits)
    plane[first:last] = pack(codes, bits)[: last - first]


def _load(plane: torch.Tensor, start: int, stop: int, bits: int, count: int) -> torch.Tensor:
    return unpack(plane[start * bits // 8 : packed_bytes(stop, bits)], bits, count)
