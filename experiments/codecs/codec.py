"""What all codecs share: the pure description, the codec, and codecs that work on rows.

A description uses no PyTorch, processes or clocks; the engine encodes with the codec that it
creates, a replay uses the sizes of the same object.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ddltrace.experiments.codecs.chunks import rows_at_once
from ddltrace.experiments.lazy_torch import torch
from ddltrace.tracer.errors import UsageError

ExchangeForm = Literal["all_reduce", "all_gather", "all_to_all"]
"""How encoded tensors are averaged over p ranks. ``all_reduce``: payloads are summed as they
are. ``all_gather``: every rank gets every payload, (p - 1) payloads sent by each rank.
``all_to_all``: every rank averages one shard of the tensor, encodes the average again, and an
all-gather distributes it; 2 (p - 1) / p payloads sent by each rank, two encodings."""


class CodecDescription(ABC):
    """A pure description of one way to shorten a tensor for the wire.

    Attributes:
        whole_tensors: Whether it encodes whole tensors only, not slices of them.
        takes_momentum: Whether it accumulates the momentum of the job's optimizer.
        gives_votes: Whether its payloads are votes, which have no scale.
        optimizers: Optimizers of ``torch.optim`` with which it works; None for all.
    """

    whole_tensors: ClassVar[bool] = False
    takes_momentum: ClassVar[bool] = False
    gives_votes: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...] | None] = None

    @property
    def opening_steps(self) -> int:
        """Exchanges at the start in which it does something else than from then on."""
        return 0

    @abstractmethod
    def codec(self, seed: int | None) -> Codec:
        """Creates what encodes and decodes; PyTorch is imported then.

        Args:
            seed: Seed of random rounding and selection. By default it differs for every codec of
                the process, except that codecs whose ranks must agree start from 0.
        """

    @abstractmethod
    def wire_bytes(self, elements: int, element_bytes: int = 4) -> int:
        """Size of one encoded tensor.

        Args:
            elements: Number of elements of the tensor.
            element_bytes: Size of one element before encoding, in bytes.

        Returns:
            Bytes of the payload on the wire.
        """

    def exchange(self, elements: int, world_size: int) -> ExchangeForm:
        """The exchange that suits the codec on this many ranks.

        By default two encodings, from the point where that sends less: a rank sends (p - 1) n bytes
        by all-gather and 2 (p - 1) n / p by all-to-all. On two ranks both are the same, and
        all-gather encodes only once.

        Args:
            elements: Number of elements of the tensor.
            world_size: Number of ranks.

        Returns:
            The form that the codec's own formula chooses.
        """
        del elements
        return "all_gather" if world_size <= 2 else "all_to_all"

    @property
    def alignment(self) -> int:
        """Elements that are encoded together: shards of a tensor start at multiples."""
        return 8

    @property
    def keeps_residual(self) -> bool:
        """Whether the codec adds unsent values to the next step's gradient."""
        return False

    @property
    def second_pass(self) -> CodecDescription:
        """The codec of averages in the second pass of ``all_to_all``; by default this codec."""
        return self

    def sent_bytes(self, elements: int, world_size: int, element_bytes: int = 4) -> int:
        """Bytes that one rank sends to average one tensor, without framing.

        Args:
            elements: Number of elements of the tensor.
            world_size: Number of ranks.
            element_bytes: Size of one element before encoding, in bytes.

        Returns:
            The bytes of the chosen exchange: a ring for ``all_reduce``, direct messages for
            the others.
        """
        if world_size < 2:
            return 0
        form = self.exchange(elements, world_size)
        if form == "all_gather":
            return (world_size - 1) * self.wire_bytes(elements, element_bytes)
        if form == "all_to_all":
            shard = shard_elements(elements, world_size, self.alignment)
            return 2 * (world_size - 1) * self.wire_bytes(shard, element_bytes)
        return 2 * (world_size - 1) * self.wire_bytes(elements, element_bytes) // world_size


def shard_elements(elements: int, world_size: int, alignment: int) -> int:
    """Elements of the shard that one rank averages; the last shard is padded with zeros.

    Args:
        elements: Number of elements of the tensor.
        world_size: Number of ranks.
        alignment: Shards are multiples of this many elements.
    """
    blocks = -(-elements // (world_size * alignment))
    return blocks * alignment


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of `elements` codes of `bits` bits each, packed."""
    return -(-elements * bits // 8)


def kept_elements(elements: int, density: float) -> int:
    """Number of elements that a sparse codec keeps: at least one of a tensor that has any."""
    return min(elements, max(1, round(density * elements)))


def check_density(density: float) -> None:
    """Raises ValueError unless the density is a share of the elements."""
    if not 0 < density <= 1:
        raise ValueError("density must be above 0 and at most 1")


@dataclass(frozen=True)
class Payload:
    """One encoded tensor.

    Attributes:
        data: The bytes that are sent: flat, contiguous, uint8.
        shape: Shape of the tensor; known on both sides, so it is not sent.
        dtype: Type of the tensor's elements; not sent either.
        draw: Number of the shared random draw that the encoding used; equal on all ranks.
    """

    data: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    draw: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.data.numel()

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


class Codec(ABC):
    """Encodes tensors for the wire and decodes them.

    Tensors are floating and dense, of any shape. A tensor with an infinite or NaN element is never
    encoded to a finite payload that hides it: the decoded tensor has NaN (or, if values are sent
    unchanged, the same infinity) in at least one element of the affected block. Such a tensor does
    not change the state that codecs keep between calls.

    Attributes:
        description: The pure description: parameters and sizes.
    """

    def __init__(self, description: CodecDescription) -> None:
        self.description = description

    def encode(self, tensor: torch.Tensor, *, key: Hashable = None) -> Payload:
        """Encodes one tensor.

        Args:
            tensor: A floating dense tensor of any shape and layout; it is not changed.
            key: Key of the state that the codec keeps for this tensor between calls.

        Returns:
            Its payload, on the tensor's device.

        Raises:
            UsageError: The tensor is sparse, or not of a floating element type, or the key is
                that of a tensor of another size.
        """
        check_encodable(tensor)
        shape = tuple(tensor.shape)
        if tensor.numel() == 0:
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return Payload(empty, shape, tensor.dtype)
        with torch.no_grad():
            return self._encode(tensor.detach().reshape(-1), shape, key)

    def decode(self, payload: Payload) -> torch.Tensor:
        """Decodes one payload.

        Args:
            payload: From `encode` of a codec with the same description.

        Returns:
            A new contiguous tensor of the original shape and element type.
        """
        if payload.elements == 0:
            return torch.empty(payload.shape, dtype=payload.dtype, device=payload.data.device)
        with torch.no_grad():
            return self._decode(payload).view(payload.shape)

    def payload_bytes(
        self, shape: Sequence[int], dtype: torch.dtype, *, key: Hashable = None
    ) -> int:
        """Bytes of the next payload of a tensor.

        Args:
            shape: Shape of the tensor.
            dtype: Type of the tensor's elements.
            key: Key of the tensor's state.
        """
        del key  # the size of most payloads does not change over the steps
        elements = math.prod(shape)
        return self.description.wire_bytes(elements, dtype.itemsize) if elements else 0

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds the decoded payload to a tensor.

        Args:
            total: Flat, of the tensor's number of elements; float32 for 16-bit tensors.
            payload: A payload of at least one element.
            factor: Factor of the decoded values that are added.
        """
        total.add_(self.decode(payload).view(-1), alpha=factor)

    def encode_rows(self, rows: torch.Tensor, keys: Sequence[Hashable]) -> list[torch.Tensor]:
        """Encodes tensors of equal length, together where the codec can.

        Args:
            rows: One flat tensor of at least one element in each row; not changed.
            keys: The key of each row's state.

        Returns:
            The bytes of each row's payload, as `encode` makes them.
        """
        return [self.encode(row, key=key).data for row, key in zip(rows, keys, strict=True)]

    def decode_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Decodes payloads of tensors of equal length.

        Args:
            data: Payloads x bytes, uint8; at least one payload.
            elements: Number of elements of each tensor, at least one.
            dtype: Type of their elements.

        Returns:
            Payloads x elements; not a view of `data`.
        """
        return torch.stack([self.decode(Payload(row, (elements,), dtype)) for row in data])

    def sum_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Adds up the payloads of several ranks for each of some tensors of equal length.

        The sum does not depend on this rank's number of threads.

        Args:
            data: Tensors x ranks x bytes, uint8.
            elements: Number of elements of each tensor, at least one.
            dtype: Type of their elements.

        Returns:
            Tensors x elements, float32 for 16-bit tensors, else of type `dtype`.
        """
        totals = data.new_zeros(data.shape[0], elements, dtype=sum_type(dtype))
        for total, payloads in zip(totals, data, strict=True):
            for payload in payloads:
                self.add_to(total, Payload(payload, (elements,), dtype))
        return totals

    def with_feedback(self) -> Codec:
        """The codec for use with error feedback; itself, unless its paper defines another form."""
        return self

    @abstractmethod
    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        """Encodes the elements of a tensor that has at least one."""

    @abstractmethod
    def _decode(self, payload: Payload) -> torch.Tensor:
        """Decodes a payload of at least one element; returns its elements, flat."""


def check_encodable(tensor: torch.Tensor) -> None:
    """Raises UsageError if a tensor is sparse, or not of a floating element type."""
    if tensor.layout != torch.strided:
        raise UsageError("a codec encodes dense tensors only; sparse gradients go as they are")
    if tensor.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise UsageError(f"a codec encodes floating tensors, not {tensor.dtype}")


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """Type of sums of tensors: float32 for 16-bit tensors, else the same."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def view_as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes read as another element type; copied first where they are not aligned.

    Args:
        data: Contiguous uint8 elements.
        dtype: The element type; its size divides the number of bytes of the last dimension.
    """
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def floats_at_start(data: torch.Tensor, count: int) -> torch.Tensor:
    """The float32 numbers with which each of some payloads begins.

    Args:
        data: Payloads x bytes, uint8.
        count: Numbers of each payload.

    Returns:
        Payloads x `count`.
    """
    return view_as(data[:, : 4 * count].reshape(-1), torch.float32).view(-1, count)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy; the last dimension becomes longer."""
    return tensor.view(torch.uint8)


def finite_or_nan(numbers: torch.Tensor) -> torch.Tensor:
    """Makes NaN of infinite numbers, in place and without a copy to the host."""
    return numbers.nan_to_num_(torch.nan, torch.nan, torch.nan)


def check_elements(known: int, flat: torch.Tensor, key: Hashable) -> None:
    """Checks that a tensor fits the state that a codec keeps for it.

    Args:
        known: Number of elements of the state.
        key: Key of the state.

    Raises:
        UsageError: The numbers of elements differ.
    """
    if known != flat.numel():
        raise UsageError(
            f"the codec keeps the state of a tensor of {known} elements under the key {key!r}, and "
            f"this one has {flat.numel()}: give each tensor a key of its own"
        )


def is_finite(flat: torch.Tensor) -> bool:
    """Whether a tensor has neither an infinite nor a NaN element.

    Args:
        flat: At least one element.
    """
    # One pass without a temporary: NaN comes through as both extremes.
    extremes: Any = torch.aminmax(flat)
    return math.isfinite(float(extremes.min)) and math.isfinite(float(extremes.max))


class RowCodec(Codec):
    """A codec without state whose operations work on the rows of a matrix.

    A call for a small tensor costs some dozens of operations, and their number does not depend
    on the number of rows.
    """

    def encode_rows(self, rows: torch.Tensor, keys: Sequence[Hashable]) -> list[torch.Tensor]:
        """Encodes as many rows together as the processor's cache holds."""
        check_encodable(rows)
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for group in torch.split(rows.detach(), rows_at_once(rows.shape[1], rows.device)):
                found += self.encode_matrix(group).unbind()
        return found

    def decode_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Decodes as many payloads together as the processor's cache holds."""
        result = torch.empty(data.shape[0], elements, dtype=dtype, device=data.device)
        at_once = rows_at_once(elements, data.device)
        with torch.no_grad():
            for part, decoded in zip(
                torch.split(data, at_once), torch.split(result, at_once), strict=True
            ):
                self._decode_matrix(part, decoded)
        return result

    def sum_rows(self, data: torch.Tensor, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Adds up decoded matrices."""
        tensors, ranks, _ = data.shape
        at_once = rows_at_once(elements, data.device, same_everywhere=True)
        if at_once == 1:
            return super().sum_rows(data, elements, dtype)
        wide = sum_type(dtype)
        if ranks <= at_once:
            sums = [
                self.decode_rows(part.flatten(0, 1), elements, dtype)
                .view(-1, ranks, elements)
                .sum(1, dtype=wide)
                for part in torch.split(data, at_once // ranks)
            ]
            return sums[0] if len(sums) == 1 else torch.cat(sums)
        totals = data.new_zeros(tensors, elements, dtype=wide)
        for total, payloads in zip(totals, data, strict=True):
            for part in torch.split(payloads, at_once):
                total.add_(self.decode_rows(part, elements, dtype).sum(0, dtype=wide))
        return totals

    def _empty_payloads(self, rows: torch.Tensor) -> torch.Tensor:
        """Payloads of the rows of a matrix, to be filled: rows x bytes."""
        count, elements = rows.shape
        size = self.description.wire_bytes(elements)
        return torch.empty(count, size, dtype=torch.uint8, device=rows.device)

    @abstractmethod
    def encode_matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Encodes the rows of a matrix, without the limit and the checks of `encode_rows`.

        Args:
            rows: Floating, at least one row and one column.

        Returns:
            Rows x bytes, uint8, contiguous.
        """

    @abstractmethod
    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        """Decodes payloads x bytes into payloads x elements."""

    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        return Payload(self.encode_matrix(flat.unsqueeze(0)).view(-1), shape, flat.dtype)

    def _decode(self, payload: Payload) -> torch.Tensor:
        data = payload.data
        result = torch.empty(1, payload.elements, dtype=payload.dtype, device=data.device)
        self._decode_matrix(data.unsqueeze(0), result)
        return result.view(-1)


class ChunkedCodec(RowCodec):
    """A codec whose payloads are decoded in pieces that stay in the processor's cache."""

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds piece by piece, without a decoded tensor in between."""
        narrow = payload.dtype if payload.dtype.itemsize < 4 else None
        for start, stop, values in self._pieces(payload.data.unsqueeze(0), payload.elements):
            decoded = values if narrow is None else values.to(narrow)
            total[start:stop].add_(decoded.view(-1), alpha=factor)

    def _decode_matrix(self, data: torch.Tensor, result: torch.Tensor) -> None:
        for start, stop, values in self._pieces(data, result.shape[1]):
            result[:, start:stop] = values

    @abstractmethod
    def _pieces(self, data: torch.Tensor, elements: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Start and stop (exclusive) of each piece of columns, and its elements as float32.

        Args:
            data: Payloads x bytes.
            elements: Number of elements of each tensor.
        """
