"""Averages by an all-reduce of payloads, for codecs whose payloads can be summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddltrace.experiments.codecs.codec import Codec, Payload, as_bytes, view_as
from ddltrace.experiments.codecs.forms.base import Coding, Form, Landing, Part
from ddltrace.experiments.collectives.base import Collectives
from ddltrace.experiments.messages.message_exchange import Handle


class AllReduceForm(Form):
    """One all-reduce of payloads, each divided by the number of ranks before."""

    def __init__(self, codec: Codec, dtype: torch.dtype | None, collectives: Collectives) -> None:
        """Takes the codec.

        Args:
            codec: Encodes and decodes.
            dtype: Type of the numbers in its payloads; None for the tensor's own.
            collectives: Collectives over the ranks.
        """
        self._codec = codec
        self._dtype = dtype
        self._collectives = collectives

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every part and launches the all-reduce."""
        dtype = self._dtype or payload.dtype
        with Coding("encode", payload.nbytes) as coding:
            payloads = [self._codec.encode(part.tensor, key=part.key) for part in parts]
            numbers = torch.cat([view_as(code.data, dtype) for code in payloads])
            numbers.div_(self._collectives.size())
            coding.bytes_out = numbers.nbytes
        work = self._collectives.all_reduce(numbers)

        def land() -> torch.Tensor:
            work.wait()
            with Coding("decode", numbers.nbytes) as coding:
                data = as_bytes(numbers)
                at = start = 0
                for code in payloads:
                    piece = data[start : start + code.nbytes]
                    mean = Payload(piece, code.shape, code.dtype, code.draw)
                    payload[at : at + code.elements] = self._codec.decode(mean).view(-1)
                    at += code.elements
                    start += code.nbytes
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)
