"""Combines the ranks' decoded tensors: by their mean, a shared scale, or a vote."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ddltrace.experiments.codecs.codec import Codec
from ddltrace.experiments.codecs.sign_sgd import SignSgdCodec
from ddltrace.experiments.codecs.ternary import TernaryCodec
from ddltrace.experiments.collectives.base import Collectives

Batch = tuple[torch.Tensor, Sequence[Hashable]]
"""Tensors of equal length as the rows of a matrix, and their keys."""

Encode = Callable[[], list[list[torch.Tensor]]]
"""Encodes batches: the bytes of each row of each of them."""


class Combination:
    """The mean of the ranks' tensors."""

    def encoder(self, codec: Codec, batches: Sequence[Batch], collectives: Collectives) -> Encode:
        """The encoder of one message; may communicate.

        Args:
            codec: The ranks'.
            batches: The tensors that the message carries, equal in number and lengths on all
                ranks.
            collectives: Collectives over the ranks.
        """
        del collectives
        return lambda: [codec.encode_rows(rows, keys) for rows, keys in batches]

    def conclude(self, total: torch.Tensor, ranks: int) -> None:
        """Makes the result of the sum of the ranks' decoded tensors, in place.

        Args:
            total: The sum.
            ranks: Number of ranks.
        """
        total.div_(ranks)


class MajorityVote(Combination):
    """The sign of the sum of signs; zero where they are balanced, NaN where one rank's is."""

    def conclude(self, total: torch.Tensor, ranks: int) -> None:
        """The sign."""
        missing = total.isnan()
        total.sign_().masked_fill_(missing, torch.nan)


class SharedScale(Combination):
    """The mean of ternary tensors that all ranks encode with the largest of their scales."""

    def encoder(self, codec: Codec, batches: Sequence[Batch], collectives: Collectives) -> Encode:
        """Agrees on the scales of all tensors by one small all-reduce."""
        assert isinstance(codec, TernaryCodec)
        if not batches:
            return list
        scales = [codec.scales_of(rows) for rows, _ in batches]
        own = torch.cat(scales)
        largest = own.clone()
        collectives.maximum(largest)
        # A maximum may lose NaN; the rank's own payload has to keep it.
        shared = torch.where(own.isnan(), own, largest)
        shares = torch.split(shared, [len(part) for part in scales])
        return lambda: [
            codec.encode_rows_scaled(rows, own, scale)
            for (rows, _), own, scale in zip(batches, scales, shares, strict=True)
        ]


def combination_of(codec: Codec) -> Combination:
    """The combination defined in a codec's paper.

    Args:
        codec: The ranks'.
    """
    if isinstance(codec, TernaryCodec):
        return SharedScale()
    if isinstance(codec, SignSgdCodec) and codec.votes:
        return MajorityVote()
    return Combination()
