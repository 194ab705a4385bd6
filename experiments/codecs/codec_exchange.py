"""Averages messages over the ranks in encoded form.

A form is one way to do so: the collectives between encoding and decoding. The parts of a message,
or their shards, are the rows of a matrix for each length: the cost of a codec for a small tensor is
the number of its calls, which grows neither with the number of ranks nor with the number of
parameters of the same length.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from ddltrace.experiments.codecs.codec import (
    Codec,
    CodecDescription,
    Payload,
    as_bytes,
    shard_elements,
    sum_type,
    view_as,
)
from ddltrace.experiments.codecs.dgc import DgcCodec
from ddltrace.experiments.codecs.feedback import FeedbackCodec, Modifier, compose
from ddltrace.experiments.codecs.half_precision import HalfPrecisionCodec
from ddltrace.experiments.codecs.power_sgd import PowerSgd, PowerSgdCodec, orthonormal
from ddltrace.experiments.codecs.sign_sgd import SignSgdCodec
from ddltrace.experiments.codecs.ternary import TernaryCodec
from ddltrace.experiments.codecs.thc import ThcCodec
from ddltrace.experiments.collectives.base import Collectives, LibraryCollectives
from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.message_exchange import Handle, Landing, MessageExchange, Pending
from ddltrace.experiments.messages.message_plan import Gradient, Message
from ddltrace.experiments.messages.trace_marks import Coding


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one message carries.

    Attributes:
        key: Key of the tensor's state.
        tensor: This rank's elements, in the tensor's shape if all are present, else flat.
    """

    key: Hashable
    tensor: torch.Tensor


class Form(ABC):
    """One way to average encoded tensors."""

    @abstractmethod
    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes a message and launches its first collective.

        Args:
            parts: The parts of tensors that the message carries.
            payload: The whole message; the parts are views of it.

        Returns:
            The message in flight; its average has the length and type of `payload`.
        """


def gather_bytes(
    data: torch.Tensor, collectives: Collectives
) -> tuple[Pending | None, torch.Tensor]:
    """Launches an all-gather of equally many bytes from every rank.

    Args:
        data: This rank's bytes, uint8, flat.
        collectives: Collectives over the ranks.

    Returns:
        The collective (None if there is nothing to send), and the received bytes: ranks x bytes.
    """
    received = data.new_empty(collectives.size(), data.numel())
    if data.numel() == 0:
        return None, received
    return collectives.all_gather(list(received.unbind()), data), received


@dataclass(frozen=True)
class Piece:
    """A tensor in the elements of a message.

    Attributes:
        key: Key of the tensor's state.
        start: Index of its first element in the message.
        stop: Exclusive.
        rank: The rank that averages it, if it is a rank's shard.
    """

    key: Hashable
    start: int
    stop: int
    rank: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Equals:
    """Tensors of equal length.

    Attributes:
        elements: Number of elements of each.
        members: Their indices in the list of pieces, in the order of the message's elements.
        keys: The keys of their state.
        ranges: Start and stop (exclusive) of the stretches of the message that they fill.
    """

    elements: int
    members: tuple[int, ...]
    keys: tuple[Hashable, ...]
    ranges: tuple[tuple[int, int], ...]

    def rows(self, payload: torch.Tensor) -> torch.Tensor:
        """The tensors as a matrix.

        Args:
            payload: The elements of the message.

        Returns:
            Tensors x elements; a view if they are neighbours.
        """
        parts = [payload[start:stop] for start, stop in self.ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, self.elements)


def equals_of(pieces: Sequence[Piece], chosen: Iterable[int] | None = None) -> tuple[Equals, ...]:
    """Groups pieces by their length.

    Args:
        pieces: Pieces of one message, each with at least one element.
        chosen: Indices of the pieces to group; by default all.

    Returns:
        One group for each length.
    """
    members: defaultdict[int, list[int]] = defaultdict(list)
    indices = range(len(pieces)) if chosen is None else chosen
    for index in sorted(indices, key=lambda index: pieces[index].start):
        members[pieces[index].elements].append(index)
    return tuple(
        Equals(
            elements,
            tuple(of_length),
            tuple(pieces[index].key for index in of_length),
            _joined([(pieces[index].start, pieces[index].stop) for index in of_length]),
        )
        for elements, of_length in members.items()
    )


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def fill(result: torch.Tensor, groups: Sequence[Equals], rows: Sequence[torch.Tensor]) -> None:
    """Puts tensors back to their places.

    Args:
        result: The elements of the message, which are filled.
        groups: Groups that cover all of them.
        rows: The tensors of each group, of the same type as `result`.
    """
    parts: list[tuple[int, torch.Tensor]] = []
    for group, matrix in zip(groups, rows, strict=True):
        lengths = [stop - start for start, stop in group.ranges]
        starts = [start for start, _ in group.ranges]
        parts += zip(starts, torch.split(matrix.reshape(-1), lengths), strict=True)
    if parts:
        torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])], out=result)


def in_order(
    groups: Sequence[Equals], encoded: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The bytes of each piece, from the bytes of each member of each group."""
    found = {
        index: data
        for group, of_group in zip(groups, encoded, strict=True)
        for index, data in zip(group.members, of_group, strict=True)
    }
    return [found[index] for index in sorted(found)]


def joined_bytes(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Payloads behind each other.

    Args:
        parts: The bytes of each.
        like: A tensor on the device, used if there is no payload.
    """
    if parts:
        return torch.cat(list(parts))
    return torch.empty(0, dtype=torch.uint8, device=like.device)


def sum_of_ranks(
    codec: Codec,
    received: torch.Tensor,
    places: Sequence[tuple[int, int]],
    elements: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Adds up what all ranks sent for some tensors of equal length.

    Args:
        codec: Decodes.
        received: Ranks x bytes.
        places: First byte and last (exclusive) of each tensor's payload, equal on all ranks.
        elements: Number of elements of each tensor.
        dtype: Type of their elements.

    Returns:
        Tensors x elements, from `Codec.sum_rows`.
    """
    parts = [received[:, start:stop] for start, stop in places]
    if len({part.shape for part in parts}) > 1:  # during DGC's warm-up
        return torch.cat([codec.sum_rows(part.unsqueeze(0), elements, dtype) for part in parts])
    together = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
    return codec.sum_rows(together, elements, dtype)


Batch: TypeAlias = "tuple[torch.Tensor, Sequence[Hashable]]"
"""Tensors of equal length as the rows of a matrix, and their keys."""

Encode: TypeAlias = "Callable[[], list[list[torch.Tensor]]]"
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


@dataclass
class AllGatherForm(Form):
    """One all-gather. All ranks add up the same payloads in the same order.

    Attributes:
        codec: Encodes this rank's tensors and decodes all ranks'.
        collectives: Collectives over the ranks.
        combination: How the ranks' tensors are combined into one.
    """

    codec: Codec
    collectives: Collectives
    combination: Combination

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every part and launches the all-gather."""
        groups = _groups(tuple((part.key, part.tensor.numel()) for part in parts))
        batches = [(group.rows(payload), group.keys) for group in groups]
        encode = self.combination.encoder(self.codec, batches, self.collectives)
        with Coding("encode", payload.nbytes) as coding:
            codes = in_order(groups, encode())
            data = joined_bytes(codes, payload)
            coding.bytes_out = data.numel()
        work, received = gather_bytes(data, self.collectives)
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
            total = sum_of_ranks(self.codec, received, places, group.elements, result.dtype)
            self.combination.conclude(total, len(received))
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


@dataclass
class AllToAllForm(Form):
    """An all-to-all of shards, then an all-gather of their averages.

    Attributes:
        worker: Encodes this rank's tensors, with its own residuals if it keeps any.
        server: Encodes averages, with residuals of its own.
        collectives: Collectives over the ranks; carry the first pass.
        second_collectives: The same ranks; carry the second pass.
        combination: How the ranks' tensors are combined into one.
    """

    worker: Codec
    server: Codec
    collectives: Collectives
    second_collectives: Collectives
    combination: Combination

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every rank's shard of every part and launches the all-to-all."""
        ranks, rank = self.collectives.size(), self.collectives.rank()
        lengths = tuple((part.key, part.tensor.numel()) for part in parts)
        shards = _shards(lengths, rank, ranks, self.worker.description.alignment)
        batches = [(group.rows(payload), group.keys) for group in shards.groups]
        encode = self.combination.encoder(self.worker, batches, self.collectives)
        with Coding("encode", payload.nbytes) as coding:
            codes = in_order(shards.groups, encode())
            sent = joined_bytes(codes, payload)
            coding.bytes_out = sent.numel()
        sizes = [code.numel() for code in codes]
        totals = [sum(sizes[of_rank.start : of_rank.stop]) for of_rank in shards.of_rank]
        received = sent.new_empty(ranks * totals[rank])
        work = self.collectives.all_to_all(received, sent, [totals[rank]] * ranks, totals)

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
        for index in shards.of_rank[self.collectives.rank()]:
            places[index] = (at, at + sizes[index])
            at += sizes[index]
        averages = []
        with Coding("decode", received.numel()) as coding:
            for group in shards.own_groups:
                places_of_group = [places[index] for index in group.members]
                total = sum_of_ranks(
                    self.worker, received, places_of_group, group.elements, like.dtype
                )
                self.combination.conclude(total, len(received))
                averages.append(total.to(like.dtype))
            coding.bytes_out = sum(average.nbytes for average in averages)
        return averages

    def _distribute(
        self, averages: Sequence[torch.Tensor], shards: _Shards, result: torch.Tensor
    ) -> torch.Tensor:
        """Encodes this rank's averages, gathers all ranks' and decodes them."""
        with Coding("encode", sum(average.nbytes for average in averages)) as coding:
            codes = [
                self.server.encode_rows(average, group.keys)
                for average, group in zip(averages, shards.own_groups, strict=True)
            ]
            data = joined_bytes(in_order(shards.own_groups, codes), result)
            coding.bytes_out = data.numel()
        sizes = [0] * len(shards.pieces)
        for group in shards.groups:
            size = self.server.payload_bytes((group.elements,), result.dtype)
            for index in group.members:
                sizes[index] = size
        # An all-gather takes as much from every rank: shards at the end are shorter.
        totals = [sum(sizes[of_rank.start : of_rank.stop]) for of_rank in shards.of_rank]
        longest = max(totals)
        padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
        work, received = gather_bytes(padded, self.second_collectives)
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
                decoded.append(self.server.decode_rows(data, group.elements, result.dtype))
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


@dataclass
class AllReduceForm(Form):
    """One all-reduce of payloads, each divided by the number of ranks before.

    Attributes:
        codec: Encodes and decodes.
        dtype: Type of the numbers in its payloads; None for the tensor's own.
        collectives: Collectives over the ranks.
    """

    codec: Codec
    dtype: torch.dtype | None
    collectives: Collectives

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes every part and launches the all-reduce."""
        dtype = self.dtype or payload.dtype
        with Coding("encode", payload.nbytes) as coding:
            payloads = [self.codec.encode(part.tensor, key=part.key) for part in parts]
            numbers = torch.cat([view_as(code.data, dtype) for code in payloads])
            numbers.div_(self.collectives.size())
            coding.bytes_out = numbers.nbytes
        work = self.collectives.all_reduce(numbers)

        def land() -> torch.Tensor:
            work.wait()
            with Coding("decode", numbers.nbytes) as coding:
                data = as_bytes(numbers)
                at = start = 0
                for code in payloads:
                    piece = data[start : start + code.nbytes]
                    mean = Payload(piece, code.shape, code.dtype, code.draw)
                    payload[at : at + code.elements] = self.codec.decode(mean).view(-1)
                    at += code.elements
                    start += code.nbytes
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)


@dataclass
class SharedRangeForm(Form):
    """A small all-reduce of the ranges, which is waited for, then one of the codes.

    A message is one tensor: its blocks do not end where its parts do.

    Attributes:
        codec: Encodes and decodes.
        feedback: Keeps residuals; None without feedback.
        collectives: Collectives over the ranks.
    """

    codec: ThcCodec
    feedback: FeedbackCodec | None
    collectives: Collectives

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Encodes the message and launches the all-reduce of its codes."""
        if not payload.numel():
            return Landing(lambda: payload)
        ranks = self.collectives.size()
        with Coding("encode", payload.nbytes) as coding:
            wanted = self._wanted(parts)
            vector = payload if wanted is None else torch.cat(wanted)
            values, ranges = self.codec.transformed(vector.unsqueeze(0))
            coding.bytes_out = ranges.nbytes
        self.collectives.maximum(ranges)
        with Coding("encode", payload.nbytes) as coding:
            codes = self.codec.codes(values, ranges, ranks)
            if wanted is not None:
                sent = torch.empty_like(vector)
                self.codec.mean(codes * ranks, ranges, ranks, sent.unsqueeze(0))
                self._keep(parts, wanted, sent)
            coding.bytes_out = codes.nbytes
        work = self.collectives.all_reduce(codes.view(-1))

        def land() -> torch.Tensor:
            work.wait()
            with Coding("decode", codes.nbytes) as coding:
                self.codec.mean(codes, ranges, ranks, payload.unsqueeze(0))
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _wanted(self, parts: Sequence[Part]) -> list[torch.Tensor] | None:
        """The parts plus their residuals; None without feedback."""
        if self.feedback is None:
            return None
        return [self.feedback.compensated(part.tensor.reshape(-1), part.key) for part in parts]

    def _keep(
        self, parts: Sequence[Part], wanted: Sequence[torch.Tensor], sent: torch.Tensor
    ) -> None:
        """Stores what was not sent."""
        assert self.feedback is not None
        pieces = torch.split(sent, [part.numel() for part in wanted])
        for part, own, piece in zip(parts, wanted, pieces, strict=True):
            self.feedback.keep(own, piece.to(sum_type(own.dtype)), part.key)


@dataclass
class _Matrix:
    """One matrix of a message: its position in the payload, and its factors."""

    key: Hashable
    start: int
    stop: int
    matrix: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor


@dataclass
class LowRankForm(Form):
    """Averages the factors of the ranks' matrices; other tensors go with the left factors.

    With feedback a rank's residual is its own matrix minus the averaged approximation, as in
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``.

    Attributes:
        codec: Keeps the right factors from step to step.
        feedback: Keeps residuals; None without feedback.
        collectives: Collectives over the ranks; carry the left factors.
        second_collectives: The same ranks; carry the right factors.
        steps: Number of messages with each tensor so far, by its key.
    """

    codec: PowerSgdCodec
    feedback: FeedbackCodec | None
    collectives: Collectives
    second_collectives: Collectives
    steps: dict[Hashable, int] = field(default_factory=dict)

    def start(self, parts: Sequence[Part], payload: torch.Tensor) -> Handle:
        """Computes the left factors and launches their all-reduce."""
        description = self.codec.description
        assert isinstance(description, PowerSgd)
        wide = torch.float32 if payload.dtype.itemsize < 4 else payload.dtype
        matrices: list[_Matrix] = []
        plain: list[tuple[int, int]] = []
        at = 0
        with Coding("encode", payload.nbytes) as coding:
            for part in parts:
                stop = at + part.tensor.numel()
                factors = description.factors(part.tensor.shape)
                step = self.steps[part.key] = self.steps.get(part.key, 0) + 1
                if step <= description.start:
                    factors = None
                if factors is None:
                    plain.append((at, stop))
                else:
                    rows, columns, rank = factors
                    flat = part.tensor.reshape(-1)
                    if self.feedback is not None:
                        flat = self.feedback.compensated(flat, part.key)
                    matrix = flat.to(wide).view(rows, columns)
                    p = self.codec.start(matrix, rank, part.key)
                    matrices.append(_Matrix(part.key, at, stop, matrix, p, p))
                at = stop
            lefts = [entry.p.reshape(-1) for entry in matrices]
            first = torch.cat([*lefts, *(payload[a:b].to(wide) for a, b in plain)])
            coding.bytes_out = first.nbytes
        first.div_(self.collectives.size())
        work = self.collectives.all_reduce(first)

        def land() -> torch.Tensor:
            work.wait()
            second = self._right_factors(matrices, first)
            if matrices:
                self.second_collectives.all_reduce(second).wait()
            with Coding("decode", first.nbytes + second.nbytes) as coding:
                at = sum(entry.p.numel() for entry in matrices)
                for start, stop in plain:
                    payload[start:stop] = first[at : at + stop - start]
                    at += stop - start
                self._approximate(matrices, second, payload)
                coding.bytes_out = payload.nbytes
            return payload

        return Landing(land)

    def _right_factors(self, matrices: Sequence[_Matrix], first: torch.Tensor) -> torch.Tensor:
        """This rank's share of every Q = M^T P, one after the other."""
        with Coding("encode", sum(entry.matrix.nbytes for entry in matrices)) as coding:
            at = 0
            for entry in matrices:
                rows, rank = entry.p.shape
                entry.p = orthonormal(first[at : at + rows * rank].view(rows, rank))
                entry.q = entry.matrix.t() @ entry.p
                at += rows * rank
            rights = [entry.q.reshape(-1) for entry in matrices]
            second = torch.cat(rights) if rights else first.new_empty(0)
            coding.bytes_out = second.nbytes
        return second.div_(self.collectives.size())

    def _approximate(
        self, matrices: Sequence[_Matrix], second: torch.Tensor, payload: torch.Tensor
    ) -> None:
        at = 0
        for entry in matrices:
            columns, rank = entry.q.shape
            q = second[at : at + columns * rank].view(columns, rank)
            at += columns * rank
            payload[entry.start : entry.stop] = (entry.p @ q.t()).view(-1)
            self.codec.remember(q, entry.key)
            if self.feedback is not None:
                sent = payload[entry.start : entry.stop]
                self.feedback.keep(entry.matrix.view(-1), sent, entry.key)


class CodecExchange(MessageExchange):
    """Encodes a message's tensors, exchanges the payloads in the codec's form, and decodes.

    All ranks get the same average to the last bit. State of a tensor, such as a residual,
    belongs to its gradient's index and range, so it outlives a new plan of messages.
    """

    rounds: ClassVar[int] = 2

    def __init__(
        self,
        codec: CodecDescription | None,
        modifier: Modifier | None,
        group: dist.ProcessGroup,
        second_group: dist.ProcessGroup,
        collectives: tuple[Collectives, Collectives] | None = None,
    ) -> None:
        """Creates the codec.

        Args:
            codec: The strategy's codec.
            modifier: Its modifier, such as error feedback.
            group: The ranks.
            second_group: The same ranks in another group, for second passes.
            collectives: Collectives over the two groups; by default the library's own.
        """
        super().__init__(group, second_group)
        description = compose(codec, modifier)
        assert description is not None
        self._collectives = collectives or (
            LibraryCollectives(group),
            LibraryCollectives(second_group),
        )
        own = description.codec(None)
        self._dgc = own if isinstance(own, DgcCodec) else None
        self._form = _form_of(own, *self._collectives)
        self._shapes: dict[int, tuple[int, ...]] = {}

    def prepare(self, gradients: Mapping[int, Gradient]) -> None:
        """Stores the shapes of the gradients."""
        self._shapes = {index: gradient.shape for index, gradient in gradients.items()}

    def take_momentum(self, momentum: float) -> None:
        """Lets DGC correct by the momentum of the job's optimizer."""
        if self._dgc is not None:
            self._dgc.take_momentum(momentum)

    def close(self) -> None:
        """Closes the collectives."""
        for each in self._collectives:
            each.close()

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Encodes, and launches the first collective."""
        parts = []
        at = 0
        for piece in message.slices:
            tensor = payload[at : at + piece.elements]
            at += piece.elements
            shape = self._shapes.get(piece.gradient, ())
            if math.prod(shape) == piece.elements:
                tensor = tensor.view(shape)
            parts.append(Part((piece.gradient, piece.start, piece.stop), tensor))
        with torch.no_grad():
            return self._form.start(parts, payload)


def _form_of(codec: Codec, first: Collectives, second: Collectives) -> Form:
    """The exchange that the codec's own formula chooses on this many ranks."""
    description = codec.description
    inner = codec.inner if isinstance(codec, FeedbackCodec) else codec
    feedback = codec if isinstance(codec, FeedbackCodec) else None
    if isinstance(inner, PowerSgdCodec):
        return LowRankForm(inner, feedback, first, second)
    if isinstance(inner, ThcCodec):
        return SharedRangeForm(inner, feedback, first)
    if isinstance(inner, DgcCodec):
        inner.ranks = first.size()
    # None of the formulas depends on the size of the tensor but PowerSGD's.
    form = description.exchange(1, first.size())
    if form == "all_reduce":
        dtype = inner.dtype if isinstance(inner, HalfPrecisionCodec) else None
        return AllReduceForm(codec, dtype, first)
    if form == "all_gather":
        return AllGatherForm(codec, first, combination_of(codec))
    server = description.second_pass.codec(None)
    return AllToAllForm(codec, server, first, second, combination_of(codec))
