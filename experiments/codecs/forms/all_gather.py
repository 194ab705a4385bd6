"""Every rank gets every payload, decodes all of them and averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddltrace.experiments.codecs.forms.base import (
    Coding,
    Form,
    Landing,
    Part,
    gather_bytes,
    wide_zeros,
)
from ddltrace.experiments.codecs.forms.votes import Combination
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.messages.message_exchange import Handle


class AllGatherForm(Form):
    """One all-gather. All ranks add up the same payloads in the same order."""

    def __init__(self, codec: Codec, collectives: Collectives, combination: Combination) -> None:
        """Takes the codec.

        Args:
            codec: Encodes this rank's tensors and decodes all ranks'.
            collectives: Collectives over the ranks.
            combination: How the ranks' tensors are combined into one.
        """
        self._codec = codec
        self._collectives = collectives
        self._combination = combination

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every part and launches the all-gather."""
        encode = self._combination.encoder(self._codec, parts, self._collectives)
        with Coding("encode", payload.nbytes) as coding:
            payloads = [encode(part.tensor, part.key) for part in parts]
            data = torch.cat([part.data for part in payloads])
            coding.bytes_out = data.numel()
        work, received = gather_bytes(data, self._collectives)

        def land() -> torch.Tensor:
            if work is not None:
                work.wait()
            with Coding("decode", data.numel() * len(received)) as coding:
                self._decode(received, payloads, payload)
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _decode(
        self, received: list[torch.Tensor], payloads: list[Payload], result: torch.Tensor
    ) -> None:
        at = start = 0
        for own in payloads:
            total = wide_zeros(result, own.elements)
            if own.elements:
                for data in received:
                    piece = data[start : start + own.nbytes]
                    self._codec.add_to(total, Payload(piece, own.shape, own.dtype, own.draw))
                self._combination.conclude(total, len(received))
            result[at : at + own.elements] = total
            at += own.elements
            start += own.nbytes
