"""Every rank averages one shard of each tensor, encodes the average again and distributes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddltrace.experiments.codecs.description import shard_elements
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


class AllToAllForm(Form):
    """An all-to-all of shards, then an all-gather of their averages."""

    def __init__(
        self,
        worker: Codec,
        server: Codec,
        collectives: Collectives,
        second_collectives: Collectives,
        combination: Combination,
    ) -> None:
        """Takes the codecs.

        Args:
            worker: Encodes this rank's tensors, with its own residuals if it keeps any.
            server: Encodes averages, with residuals of its own.
            collectives: Collectives over the ranks; carry the first pass.
            second_collectives: The same ranks; carry the second pass.
            combination: How the ranks' tensors are combined into one.
        """
        self._worker, self._server = worker, server
        self._collectives, self._second_collectives = collectives, second_collectives
        self._combination = combination

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every rank's shard of every part and launches the all-to-all."""
        ranks, own_rank = self._collectives.size(), self._collectives.rank()
        ranges = [self._shards(part.tensor.numel()) for part in parts]
        pieces = [
            [
                Part((part.key, rank), part.tensor.reshape(-1)[start:stop])
                for part, shards in zip(parts, ranges, strict=True)
                for start, stop in [shards[rank]]
            ]
            for rank in range(ranks)
        ]
        every = [piece for of_rank in pieces for piece in of_rank]
        encode = self._combination.encoder(self._worker, every, self._collectives)
        with Coding("encode", payload.nbytes) as coding:
            encoded = [[encode(piece.tensor, piece.key) for piece in of_rank] for of_rank in pieces]
            sent = torch.cat([code.data for of_rank in encoded for code in of_rank])
            coding.bytes_out = sent.numel()
        lengths = [sum(code.nbytes for code in of_rank) for of_rank in encoded]
        received = sent.new_empty(ranks * lengths[own_rank])
        work = self._collectives.all_to_all(received, sent, [lengths[own_rank]] * ranks, lengths)

        def land() -> torch.Tensor:
            work.wait()
            averages = self._average(received.view(ranks, -1), encoded[own_rank], payload)
            return self._distribute(averages, pieces, ranges, payload)

        return Landing(land)

    def _shards(self, elements: int) -> list[tuple[int, int]]:
        ranks = self._collectives.size()
        size = shard_elements(elements, ranks, self._worker.description.alignment)
        return [
            (min(rank * size, elements), min((rank + 1) * size, elements)) for rank in range(ranks)
        ]

    def _average(
        self, received: torch.Tensor, own: Sequence[Payload], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """The averages of this rank's shards."""
        averages = []
        at = 0
        with Coding("decode", received.numel()) as coding:
            for code in own:
                total = wide_zeros(like, code.elements)
                if code.elements:
                    for data in received:
                        piece = data[at : at + code.nbytes]
                        self._worker.add_to(total, Payload(piece, code.shape, code.dtype))
                    self._combination.conclude(total, len(received))
                averages.append(total.to(like.dtype))
                at += code.nbytes
            coding.bytes_out = sum(average.nbytes for average in averages)
        return averages

    def _distribute(
        self,
        averages: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[Part]],
        ranges: Sequence[Sequence[tuple[int, int]]],
        result: torch.Tensor,
    ) -> torch.Tensor:
        """Encodes this rank's averages, gathers all ranks' and decodes them."""
        own = pieces[self._collectives.rank()]
        sizes = [
            [self._server.payload_bytes(p.tensor.shape, result.dtype, key=p.key) for p in of_rank]
            for of_rank in pieces
        ]
        with Coding("encode", sum(average.nbytes for average in averages)) as coding:
            codes = [
                self._server.encode(average, key=piece.key)
                for average, piece in zip(averages, own, strict=True)
            ]
            data = torch.cat([code.data for code in codes])
            coding.bytes_out = data.numel()
        # An all-gather takes as much from every rank: shards at the end are shorter.
        longest = max(sum(of_rank) for of_rank in sizes)
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        work, received = gather_bytes(padded, self._second_collectives)
        if work is not None:
            work.wait()
        with Coding("decode", longest * len(received)) as coding:
            self._decode(received, sizes, ranges, result)
            coding.bytes_out = result.nbytes
        return result

    def _decode(
        self,
        received: Sequence[torch.Tensor],
        sizes: Sequence[Sequence[int]],
        ranges: Sequence[Sequence[tuple[int, int]]],
        result: torch.Tensor,
    ) -> None:
        for rank, data in enumerate(received):
            at = offset = 0
            for size, shards in zip(sizes[rank], ranges, strict=True):
                start, stop = shards[rank]
                code = Payload(data[at : at + size], (stop - start,), result.dtype)
                result[offset + start : offset + stop] = self._server.decode(code)
                at += size
                offset += shards[-1][1]
