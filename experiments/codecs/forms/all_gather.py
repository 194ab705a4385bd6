"""Every rank gets every payload, decodes all of them and averages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence

import torch

from ddltrace.experiments.codecs.codec import Codec
from ddltrace.experiments.codecs.forms.base import Coding, Form, Landing, Part, gather_bytes
from ddltrace.experiments.codecs.forms.equal_lengths import (
    Equals,
    Piece,
    equals_of,
    fill,
    in_order,
    joined_bytes,
    sum_of_ranks,
)
from ddltrace.experiments.codecs.forms.votes import Combination
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
        groups = _groups(tuple((part.key, part.tensor.numel()) for part in parts))
        batches = [(group.rows(payload), group.keys) for group in groups]
        encode = self._combination.encoder(self._codec, batches, self._collectives)
        with Coding("encode", payload.nbytes) as coding:
            codes = in_order(groups, encode())
            data = joined_bytes(codes, payload)
            coding.bytes_out = data.numel()
        work, received = gather_bytes(data, self._collectives)
        sizes = [code.numel() for code in codes]

        def land() -> torch.Tensor:
            if work is not None:
                work.wait()
            with Coding("decode", received.numel()) as coding:
                self._decode(received, groups, sizes, payload)
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _decode(
        self,
        received: torch.Tensor,
        groups: Sequence[Equals],
        sizes: Sequence[int],
        result: torch.Tensor,
    ) -> None:
        ends = list(itertools.accumulate(sizes))
        averages = []
        for group in groups:
            places = [(ends[index] - sizes[index], ends[index]) for index in group.members]
            total = sum_of_ranks(self._codec, received, places, group.elements, result.dtype)
            self._combination.conclude(total, len(received))
            averages.append(total.to(result.dtype))
        fill(result, groups, averages)


@functools.lru_cache(maxsize=256)
def _groups(parts: tuple[tuple[Hashable, int], ...]) -> tuple[Equals, ...]:
    """Groups the parts of a message, given as keys and numbers of elements."""
    pieces = []
    at = 0
    for key, elements in parts:
        if elements:
            pieces.append(Piece(key, at, at + elements))
        at += elements
    return equals_of(pieces)
