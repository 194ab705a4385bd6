"""The interface of every codec, and the checks that all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddltrace.experiments.codecs.description import CodecDescription
from ddltrace.tracer.errors import UsageError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Element types that codecs accept."""


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
    if tensor.dtype not in FLOATS:
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
        flat: The tensor.
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
