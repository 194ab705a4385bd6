"""Top-k sparsification: Aji & Heafield, "Sparse Communication for Distributed Gradient
Descent" (Gradient Dropping), EMNLP 2017."""

from __future__ import annotations

from dataclasses import dataclass

from ddltrace.experiments.codecs.description import (
    CodecDescription,
    ExchangeForm,
    check_density,
    kept_elements,
    packed_bytes,
)
from ddltrace.experiments.technique import technique

_LARGEST_CHUNK = 1 << 16
_VALUE_BITS = range(2, 9)
_BOUNDS_BYTES = 8


@technique(
    "volume",
    "topk",
    "the elements of largest magnitude; use with feedback",
    "Gradient Dropping, EMNLP 2017",
)
@dataclass(frozen=True)
class TopK(CodecDescription):
    """The elements of largest magnitude as pairs of index and value.

    The paper's method is ``topk+feedback``, which keeps what was not sent. With chunks and
    2 bits it is the codec of SparseLoCo, arXiv 2508.15706.

    Attributes:
        density: Share of the elements that is sent.
        chunk: Elements of a chunk, of each of which this share is sent, with indices of
            log2(chunk) bits; 0 selects in the whole tensor, with indices of 32 bits.
        bits: Bits of a value: its sign and a magnitude between the smallest and the largest
            that its chunk sends; 0 sends values as they are.
    """

    density: float = 0.01
    chunk: int = 0
    bits: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.chunk and not 2 <= self.chunk <= _LARGEST_CHUNK:
            raise ValueError(f"chunk must be 0 or between 2 and {_LARGEST_CHUNK} elements")
        if self.bits and self.bits not in _VALUE_BITS:
            raise ValueError(
                f"bits must be 0 or between {_VALUE_BITS.start} and {_VALUE_BITS.stop - 1}"
            )
        if self.bits and not self.chunk:
            raise ValueError("bits needs chunk=, whose largest value scales the others")

    def chunk_of(self, elements: int) -> int:
        """Elements of a chunk of a tensor: no more than it has."""
        return min(self.chunk, elements)

    def index_bits(self, elements: int) -> int:
        """Bits of an index within a chunk of a tensor."""
        return max(1, (self.chunk_of(elements) - 1).bit_length())

    def kept(self, elements: int) -> int:
        """Number of elements of a tensor that are sent."""
        if not self.chunk:
            return kept_elements(elements, self.density)
        chunk = self.chunk_of(elements)
        if chunk == 0:
            return 0
        whole, rest = divmod(elements, chunk)
        last = kept_elements(rest, self.density) if rest else 0
        return whole * kept_elements(chunk, self.density) + last

    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """An index and a value for each element that is kept, and each chunk's magnitudes."""
        kept = self.kept(elements)
        if not self.chunk or not kept:
            return (4 + element_bytes) * kept
        indices = packed_bytes(kept, self.index_bits(elements))
        if not self.bits:
            return indices + kept * element_bytes
        chunks = -(-elements // self.chunk_of(elements))
        return _BOUNDS_BYTES * chunks + indices + packed_bytes(kept, self.bits)

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """All-gather: the ranks keep different elements, so payloads cannot be summed."""
        return "all_gather"
