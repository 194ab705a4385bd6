"""Every rank averages one shard of each tensor, encodes the average again and distributes it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ddltrace.experiments.codecs.codec import Codec, shard_elements
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


@dataclass(frozen=True)
class _Shards:
    """The shards of one message, which depend on its parts and the rank only.

    Attributes:
        pieces: All that have elements, rank by rank, and of one rank in the order of parts.
        of_rank: The indices of each rank's.
        groups: All of them by their length.
        own_groups: This rank's by their length.
    """

    pieces: tuple[Piece, ...]
    of_rank: tuple[range, ...]
    groups: tuple[Equals, ...]
    own_groups: tuple[Equals, ...]


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
        ranks, rank = self._collectives.size(), self._collectives.rank()
        lengths = tuple((part.key, part.tensor.numel()) for part in parts)
        shards = _shards(lengths, rank, ranks, self._worker.description.alignment)
        batches = [(group.rows(payload), group.keys) for group in shards.groups]
        encode = self._combination.encoder(self._worker, batches, self._collectives)
        with Coding("encode", payload.nbytes) as coding:
            codes = in_order(shards.groups, encode())
            sent = joined_bytes(codes, payload)
            coding.bytes_out = sent.numel()
        sizes = [code.numel() for code in codes]
        totals = [sum(sizes[of_rank.start : of_rank.stop]) for of_rank in shards.of_rank]
        received = sent.new_empty(ranks * totals[rank])
        work = self._collectives.all_to_all(received, sent, [totals[rank]] * ranks, totals)

        def land() -> torch.Tensor:
            work.wait()
            averages = self._average(received.view(ranks, -1), shards, sizes, payload)
            return self._distribute(averages, shards, payload)

        return Landing(land)

    def _average(
        self, received: torch.Tensor, shards: _Shards, sizes: Sequence[int], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """The averages of each group of this rank's shards."""
        places = {}
        at = 0
        for index in shards.of_rank[self._collectives.rank()]:
            places[index] = (at, at + sizes[index])
            at += sizes[index]
        averages = []
        with Coding("decode", received.numel()) as coding:
            for group in shards.own_groups:
                places_of_group = [places[index] for index in group.members]
                total = sum_of_ranks(
                    self._worker, received, places_of_group, group.elements, like.dtype
                )
                self._combination.conclude(total, len(received))
                averages.append(total.to(like.dtype))
            coding.bytes_out = sum(average.nbytes for average in averages)
        return averages

    def _distribute(
        self, averages: Sequence[torch.Tensor], shards: _Shards, result: torch.Tensor
    ) -> torch.Tensor:
        """Encodes this rank's averages, gathers all ranks' and decodes them."""
        with Coding("encode", sum(average.nbytes for average in averages)) as coding:
            codes = [
                self._server.encode_rows(average, group.keys)
                for average, group in zip(averages, shards.own_groups, strict=True)
            ]
            data = joined_bytes(in_order(shards.own_groups, codes), result)
            coding.bytes_out = data.numel()
        sizes = [0] * len(shards.pieces)
        for group in shards.groups:
            size = self._server.payload_bytes((group.elements,), result.dtype)
            for index in group.members:
                sizes[index] = size
        # An all-gather takes as much from every rank: shards at the end are shorter.
        totals = [sum(sizes[of_rank.start : of_rank.stop]) for of_rank in shards.of_rank]
        longest = max(totals)
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        work, received = gather_bytes(padded, self._second_collectives)
        if work is not None:
            work.wait()
        with Coding("decode", received.numel()) as coding:
            lengths: list[int] = []
            for of_rank, total in zip(shards.of_rank, totals, strict=True):
                lengths += [*sizes[of_rank.start : of_rank.stop], longest - total]
            pieces = torch.split(received.view(-1), lengths)
            decoded = []
            for group in shards.groups:
                # Behind each rank's pieces lies its padding.
                found = [pieces[index + shards.pieces[index].rank] for index in group.members]
                data = torch.cat(found).view(len(found), -1)
                decoded.append(self._server.decode_rows(data, group.elements, result.dtype))
            fill(result, shards.groups, decoded)
            coding.bytes_out = result.nbytes
        return result


@functools.lru_cache(maxsize=256)
def _shards(
    parts: tuple[tuple[Hashable, int], ...], own: int, ranks: int, alignment: int
) -> _Shards:
    """Cuts the parts of a message, given as keys and numbers of elements."""
    pieces: list[Piece] = []
    of_rank = []
    for rank in range(ranks):
        first, offset = len(pieces), 0
        for key, elements in parts:
            size = shard_elements(elements, ranks, alignment)
            start, stop = min(rank * size, elements), min((rank + 1) * size, elements)
            if start < stop:
                pieces.append(Piece((key, rank), offset + start, offset + stop, rank))
            offset += elements
        of_rank.append(range(first, len(pieces)))
    return _Shards(
        tuple(pieces), tuple(of_rank), equals_of(pieces), equals_of(pieces, of_rank[own])
    )
