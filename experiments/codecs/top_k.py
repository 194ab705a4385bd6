"""Top-k sparsification: Aji & Heafield, "Sparse Communication for Distributed Gradient
Descent" (Gradient Dropping), EMNLP 2017."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    ExchangeForm,
    Payload,
    as_bytes,
    check_density,
    kept_elements,
    packed_bytes,
    view_as,
)
from ddltrace.experiments.codecs.packing import PackedLevels
from ddltrace.experiments.codecs.sparse import SparseCodec, largest, sparse_payload
from ddltrace.experiments.lazy_torch import torch
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

    def codec(self, seed: int | None) -> Codec:
        """The largest elements of the tensor, or of each chunk."""
        return ChunkedTopKCodec(self) if self.chunk else TopKCodec(self)

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


class TopKCodec(SparseCodec):
    """Sends k elements as they are. Infinite and NaN elements are the first to be sent."""

    def __init__(self, description: TopK) -> None:
        super().__init__(description)
        self._density = description.density

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        count = kept_elements(flat.numel(), self._density)
        return sparse_payload(flat, largest(flat, count), shape)


class ChunkedTopKCodec(SparseCodec):
    """Sends the k largest elements of each chunk.

    With `TopK.bits`, a value is a sign and one of equally spaced magnitudes from the smallest to
    the largest magnitude that the chunk sends; so no error is as large as the element. A chunk
    with an infinite or NaN element then decodes to NaN in all places that it sends; without bits
    infinite and NaN elements are the first to be sent.

    Payload: with bits the smallest and the largest magnitude of each chunk as float32, the
    indices within their chunks, packed, and the values or their packed codes.
    """

    def __init__(self, description: TopK) -> None:
        super().__init__(description)
        self._top_k = description

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        chunk = self._top_k.chunk_of(flat.numel())
        whole = flat.numel() // chunk * chunk
        places = _largest(flat[:whole].view(-1, chunk), self._top_k.density)
        rows, inside = _row_numbers(places, 0), places.reshape(-1)
        if whole < flat.numel():
            rest = _largest(flat[whole:].view(1, -1), self._top_k.density)
            rows = torch.cat([rows, _row_numbers(rest, whole // chunk)])
            inside = torch.cat([inside, rest.reshape(-1)])
        values = flat[rows * chunk + inside]
        parts = [_packed(inside, self._top_k.index_bits(flat.numel()))]
        if self._top_k.bits:
            chunks = -(-flat.numel() // chunk)
            bounds, codes = self._quantized(values.float(), rows, chunks)
            parts = [as_bytes(bounds.reshape(-1)), *parts, _packed(codes, self._top_k.bits)]
        else:
            parts.append(as_bytes(values))
        return Payload(torch.cat(parts), shape, flat.dtype)

    def _quantized(
        self, values: torch.Tensor, rows: torch.Tensor, chunks: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest magnitude of each chunk, and the codes of the values."""
        levels = 1 << (self._top_k.bits - 1)
        magnitudes = values.abs()
        low = values.new_full((chunks,), torch.inf)
        low.scatter_reduce_(0, rows, magnitudes, "amin")
        high = values.new_zeros(chunks).scatter_reduce_(0, rows, magnitudes, "amax")
        bad = ~(low.isfinite() & high.isfinite())
        bounds = torch.stack([low, high]).masked_fill_(bad, torch.nan)
        low, step = bounds[0], (bounds[1] - bounds[0]) / (levels - 1)
        level = ((magnitudes - low[rows]) / step[rows]).nan_to_num_(0.0, posinf=0.0)
        level.round_().clamp_(0, levels - 1)
        return bounds, level.add_(levels * (values < 0))

    def _parts(self, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int64) and values of a payload."""
        elements, data = payload.elements, payload.data
        chunk, count = self._top_k.chunk_of(elements), self._top_k.kept(elements)
        per_chunk = kept_elements(chunk, self._top_k.density)
        rows = torch.arange(count, device=data.device) // per_chunk
        start = 0
        bounds = None
        if self._top_k.bits:
            chunks = -(-elements // chunk)
            start = _BOUNDS_BYTES * chunks
            bounds = view_as(data[:start], torch.float32).view(2, chunks)
        bits = self._top_k.index_bits(elements)
        stop = start + packed_bytes(count, bits)
        indices = rows * chunk + _unpacked(data[start:stop], count, bits).long()
        if bounds is None:
            return indices, view_as(data[stop:], payload.dtype)
        levels = 1 << (self._top_k.bits - 1)
        codes = _unpacked(data[stop:], count, self._top_k.bits)
        negative = codes >= levels
        step = (bounds[1] - bounds[0]) / (levels - 1)
        magnitudes = bounds[0][rows] + (codes - levels * negative) * step[rows]
        return indices, torch.where(negative, -magnitudes, magnitudes).to(payload.dtype)


def _largest(rows: torch.Tensor, density: float) -> torch.Tensor:
    """Columns of the largest magnitudes of each row: rows x k."""
    count = kept_elements(rows.shape[1], density)
    return torch.topk(rows.abs(), count, dim=1, sorted=False).indices


def _row_numbers(places: torch.Tensor, first: int) -> torch.Tensor:
    numbers = torch.arange(first, first + places.shape[0], device=places.device)
    return numbers.repeat_interleave(places.shape[1])


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    count = codes.numel()
    data = torch.empty(packed_bytes(count, bits), dtype=torch.uint8, device=codes.device)
    padded = torch.nn.functional.pad(codes.float(), (0, -count % 8))
    PackedLevels(data, count, bits).write(0, count, padded)
    return data


def _unpacked(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    codes = torch.empty(-(-count // 8) * 8, dtype=torch.float32, device=data.device)
    PackedLevels(data, count, bits).read(0, count, codes)
    return codes[:count]
