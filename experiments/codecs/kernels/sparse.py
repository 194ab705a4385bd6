"""Pairs of index and value on the wire: all 32-bit indices, then all values."""

from __future__ import annotations

import torch

from ddltrace.experiments.codecs.kernels.codec import Payload, as_bytes, view_as

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


def sparse_parts(payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices (int64) and values of a payload from `sparse_payload`."""
    count = payload.nbytes // (_INDEX_BYTES + payload.dtype.itemsize)
    indices = view_as(payload.data[: _INDEX_BYTES * count], torch.int32).long()
    return indices, view_as(payload.data[_INDEX_BYTES * count :], payload.dtype)


def densified(payload: Payload) -> torch.Tensor:
    """All elements of a payload from `sparse_payload`, zero where none was sent."""
    indices, values = sparse_parts(payload)
    result = torch.zeros(payload.elements, dtype=payload.dtype, device=payload.data.device)
    result[indices] = values
    return result


def add_sparse(total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
    """Adds a payload from `sparse_payload` without its zeros.

    Args:
        total: Flat; changed in place.
        payload: The payload to add.
        factor: Factor of the decoded values that are added.
    """
    indices, values = sparse_parts(payload)
    total.index_add_(0, indices, values.to(total.dtype), alpha=factor)
