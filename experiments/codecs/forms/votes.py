"""Combines the ranks' decoded tensors: by their mean, a shared scale, or a vote."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from ddltrace.experiments.codecs.forms.base import Part
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload
from ddltrace.experiments.codecs.kernels.sign_sgd import SignSgdCodec
from ddltrace.experiments.codecs.kernels.ternary import TernaryCodec
from ddltrace.experiments.collectives.base import Collectives

Encode = Callable[[torch.Tensor, Hashable], Payload]


class Combination:
    """The mean of the ranks' tensors."""

    def encoder(self, codec: Codec, parts: Sequence[Part], collectives: Collectives) -> Encode:
        """The encoder of the parts of one message; may communicate.

        Args:
            codec: The ranks'.
            parts: The parts of tensors that the message carries.
            collectives: Collectives over the ranks.
        """
        del parts, collectives

        def encode(tensor: torch.Tensor, key: Hashable) -> Payload:
            return codec.encode(tensor, key=key)

        return encode

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

    def encoder(self, codec: Codec, parts: Sequence[Part], collectives: Collectives) -> Encode:
        """Agrees on the scale of every part by one small all-reduce."""
        assert isinstance(codec, TernaryCodec)
        filled = [part for part in parts if part.tensor.numel()]
        if not filled:
            return super().encoder(codec, parts, collectives)
        own = torch.stack([codec.scale_of(part.tensor) for part in filled])
        largest = own.clone()
        collectives.maximum(largest)
        # A maximum may lose NaN; the rank's own payload has to keep it.
        shared = torch.where(own.isnan(), own, largest)
        scale_of = {part.key: scale for part, scale in zip(filled, shared, strict=True)}

        def encode(tensor: torch.Tensor, key: Hashable) -> Payload:
            if tensor.numel() == 0:
                return codec.encode(tensor)
            return codec.encode_scaled(tensor, scale_of[key])

        return encode


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
