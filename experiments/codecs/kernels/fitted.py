"""Random rounding below a residual: scaled so that it never sends more than it leaves."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, as_bytes, view_as

_SCALE_BYTES = 4


class FittedCodec(Codec):
    """A codec of scales and levels, each scale multiplied by the least-squares factor.

    Unbiased rounding to few levels has an error larger than the tensor itself, so residuals
    would grow without bound. With the factor <g, Q> / <Q, Q> of each scale's elements the error
    is at most the tensor, which is what error feedback needs (Karimireddy et al.,
    arXiv 1901.09847, assumption A).
    """

    def __init__(self, inner: Codec, group: int | None) -> None:
        """Wraps a codec.

        Args:
            inner: Its payloads begin with float32 scales.
            group: Elements of one scale; None for one scale a tensor.
        """
        super().__init__(inner.description)
        self._inner = inner
        self._group = group

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        payload = self._inner.encode(flat.view(shape), key=key)
        decoded = self._decode(payload)
        group = self._group or flat.numel()
        product = _sums(flat * decoded, group)
        square = _sums(decoded.square(), group)
        factor = torch.where(square == 0, 0.0, product / square)
        header = _SCALE_BYTES * factor.numel()
        scales = view_as(payload.data[:header], torch.float32) * factor
        payload.data[:header] = as_bytes(scales.to(torch.float32))
        return payload

    def _decode(self, payload: Payload) -> torch.Tensor:
        return self._inner.decode(payload).view(-1)

    def payload_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, *, key: Hashable = None
    ) -> int:
        """The inner codec's."""
        return self._inner.payload_bytes(shape, dtype, key=key)


def _sums(values: torch.Tensor, group: int) -> torch.Tensor:
    """The sum of every `group` elements, in float64."""
    whole = values.numel() // group * group
    sums = values[:whole].view(-1, group).sum(1, dtype=torch.float64)
    if whole == values.numel():
        return sums
    return torch.cat([sums, values[whole:].sum(dtype=torch.float64).view(1)])
