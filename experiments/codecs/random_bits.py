"""Cheap random numbers for stochastic rounding: 16 bits an element, from a table of random words.

PyTorch's own generator needs 2 to 6 ns an element on a processor, longer than all other
arithmetic of a codec, and drawing from it would change what the job draws after.
"""

from __future__ import annotations

import itertools
from typing import Final

from ddltrace.experiments.lazy_torch import dist, torch

BITS: Final = 16
"""Random bits of one number. The bias of a rounding with them is below 2 ** -17 of a level."""

_WORD: Final = (1 << 64) - 1
_PLACES: Final = 1 << 16
"""Places of the table at which a draw may begin."""

_made = itertools.count()
_tables: Final[dict[torch.device, torch.Tensor]] = {}


class RandomBits:
    """A stream of random 16-bit numbers.

    One draw reads a stretch of a table of random words, from a random place on, and maps each word
    to odd * word + offset with a random odd number and a random offset of its own. Every number is
    uniform, the numbers of one draw are independent as the table's are, and two draws are
    uncorrelated.
    """

    def __init__(self, seed: int | None) -> None:
        """Starts the stream.

        Args:
            seed: Seed of the stream. By default a different one for each stream of the process and
                each rank, derived from ``torch.initial_seed()``.
        """
        if seed is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            seed = _mix(torch.initial_seed() & _WORD) ^ _mix(rank << 32 | next(_made))
        self._state = _mix(seed & _WORD)
        self._words = torch.empty(0, dtype=torch.int32)

    def draw(self, out: torch.Tensor) -> None:
        """Fills a buffer with random numbers.

        Args:
            out: float32, flat, an even number of elements; afterwards whole numbers, uniform
                from -32768 to 32767.
        """
        half = out.numel() // 2
        if self._words.numel() < half or self._words.device != out.device:
            self._words = torch.empty(half, dtype=torch.int32, device=out.device)
        self._state = (self._state + 0x9E3779B97F4A7C15) & _WORD
        map_bits, place_bits = _mix(self._state), _mix(self._state ^ _WORD)
        place = place_bits % _PLACES
        stretch = _table(half + _PLACES, out.device)[place : place + half]
        words = torch.mul(stretch, _signed(map_bits | 1), out=self._words[:half])
        words.add_(_signed(map_bits >> 32))
        out.copy_(words.view(torch.int16))


def round_at_random(values: torch.Tensor, noise: torch.Tensor, bits: RandomBits) -> None:
    """Adds to each value a number that is uniform in (0, 1): truncation then rounds at random.

    Args:
        values: float32, an even number of elements, each raised by `OFFSET` already; changed in
            place.
        noise: A contiguous buffer of its shape.
        bits: Source of random bits.
    """
    bits.draw(noise.view(-1))
    values.add_(noise, alpha=2.0**-BITS)


OFFSET: Final = 0.5 + 2.0 ** -(BITS + 1)
"""Offset after which the numbers of `RandomBits.draw`, divided by 2 ** 16, are uniform in (0,
1)."""


def _table(words: int, device: torch.device) -> torch.Tensor:
    """At least this many random 32-bit words, the same in all processes."""
    table = _tables.get(device)
    if table is None or table.numel() < words:
        table = _hashed(words, device)
        _tables[device] = table
    return table


def _hashed(words: int, device: torch.device) -> torch.Tensor:
    """The finalizer of MurmurHash3 (A. Appleby) of the numbers from 1 on, seeded twice."""
    table = torch.arange(1, words + 1, dtype=torch.int32, device=device)
    _fold(table.add_(_signed(0x3C6EF372)), 16).mul_(_signed(0x85EBCA6B))
    _fold(table, 13).add_(_signed(0xA54FF53A)).mul_(_signed(0xC2B2AE35))
    return _fold(table, 16)


def _fold(words: torch.Tensor, places: int) -> torch.Tensor:
    # PyTorch shifts the sign in; the mask makes zeros of it.
    shifted = words.bitwise_right_shift(places).bitwise_and_((1 << (32 - places)) - 1)
    return words.bitwise_xor_(shifted)


def _mix(word: int) -> int:
    # The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014).
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
