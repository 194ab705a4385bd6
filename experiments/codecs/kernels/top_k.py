"""Top-k sparsification."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ddltrace.experiments.codecs.description import kept_elements
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload
from ddltrace.experiments.codecs.kernels.largest import largest
from ddltrace.experiments.codecs.kernels.sparse import add_sparse, densified, sparse_payload
from ddltrace.experiments.codecs.top_k import TopK


class TopKCodec(Codec):
    """Sends k elements as they are. Infinite and NaN elements are the first to be sent."""

    def __init__(self, description: TopK) -> None:
        super().__init__(description)
        self._density = description.density

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        count = kept_elements(flat.numel(), self._density)
        return sparse_payload(flat, largest(flat, count), shape)

    def _decode(self, payload: Payload) -> torch.Tensor:
        return densified(payload)

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds the elements that were sent."""
        add_sparse(total, payload, factor)
