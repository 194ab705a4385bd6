"""Sparse payloads: the elements of largest magnitude, and pairs of index and value on the wire."""

from __future__ import annotations

from ddltrace.experiments.codecs.codec import Codec, Payload, as_bytes, view_as
from ddltrace.experiments.lazy_torch import torch

_INDEX_BYTES = 4


def sparse_payload(flat: torch.Tensor, indices: torch.Tensor, shape: tuple[int, ...]) -> Payload:
    """Encodes some elements of a tensor.

    Args:
        flat: All its elements.
        indices: Indices of the elements that are sent, int64.
        shape: Shape of the tensor.
    """
    values = flat[indices]
    data = torch.cat([as_bytes(indices.to(torch.int32)), as_bytes(values)])
    return Payload(data, shape, flat.dtype)


class SparseCodec(Codec):
    """A codec that sends some elements, and nothing of the others."""

    def _parts(self, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices (int64) and values of a payload; by default of one from `sparse_payload`."""
        count = payload.nbytes // (_INDEX_BYTES + payload.dtype.itemsize)
        indices = view_as(payload.data[: _INDEX_BYTES * count], torch.int32).long()
        return indices, view_as(payload.data[_INDEX_BYTES * count :], payload.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        indices, values = self._parts(payload)
        result = torch.zeros(payload.elements, dtype=payload.dtype, device=values.device)
        result[indices] = values
        return result

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds the elements that were sent, without the zeros between them."""
        indices, values = self._parts(payload)
        total.index_add_(0, indices, values.to(total.dtype), alpha=factor)


_SAMPLE = 4096
_WORTHWHILE = 1 << 15
_DENSE = 0.1


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Finds the elements of largest magnitude; NaN counts as the largest.

    A sample estimates the magnitude above which slightly more than `count` elements lie; only these
    are compared. If there are fewer, all elements are compared.

    Args:
        values: Floating, flat.
        count: Number of elements to find, at most all.

    Returns:
        Their indices: int64, in no order; every one of them is at least as large as every
        other element.
    """
    total = values.numel()
    if count >= total:
        return torch.arange(total, device=values.device)
    magnitudes = values.abs()
    if values.device.type == "cpu" and total >= _WORTHWHILE and count <= _DENSE * total:
        candidates = (magnitudes >= _limit(magnitudes, count)).nonzero().view(-1)
        # Comparisons with NaN are false, so the count may be too small.
        if count <= candidates.numel() and not bool(magnitudes.sum().isnan()):
            chosen = torch.topk(magnitudes[candidates], count, sorted=False).indices
            return candidates[chosen]
    return torch.topk(magnitudes, count, sorted=False).indices


def _limit(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    total = magnitudes.numel()
    # Evenly spaced elements would meet the same column of every row: an odd stride does not.
    stride = (total // _SAMPLE) | 1
    sample = magnitudes[::stride]
    expected = sample.numel() * count / total
    # Three standard deviations more than expected, so that hardly ever too few are found.
    rank = min(sample.numel(), int(expected + 3 * expected**0.5) + 2)
    return torch.topk(sample, rank, sorted=False).values.min()
