"""The interface of every codec, and the checks that all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
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
            UsageError: The tensor is sparse, or not of a floating element type.
        """
        if tensor.layout != torch.strided:
            raise UsageError("a codec encodes dense tensors only; sparse gradients go as they are")
        if tensor.dtype not in FLOATS:
            raise UsageError(f"a codec encodes floating tensors, not {tensor.dtype}")
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

    def with_feedback(self) -> Codec:
        """The codec for use with error feedback; itself, unless its paper defines another form."""
        return self

    @abstractmethod
    def _encode(self, flat: torch.Tensor, shape: tuple[int, ...], key: Hashable) -> Payload:
        """Encodes the elements of a tensor that has at least one."""

    @abstractmethod
    def _decode(self, payload: Payload) -> torch.Tensor:
        """Decodes a payload of at least one element; returns its elements, flat."""


class ChunkedCodec(Codec):
    """A codec whose payloads are decoded in pieces that stay in the processor's cache."""

    def add_to(self, total: torch.Tensor, payload: Payload, factor: float = 1.0) -> None:
        """Adds piece by piece, without a decoded tensor in between."""
        narrow = payload.dtype if payload.dtype.itemsize < 4 else None
        for start, stop, values in self._pieces(payload):
            decoded = values if narrow is None else values.to(narrow)
            total[start:stop].add_(decoded, alpha=factor)

    def _decode(self, payload: Payload) -> torch.Tensor:
        result = torch.empty(payload.elements, dtype=payload.dtype, device=payload.data.device)
        for start, stop, values in self._pieces(payload):
            result[start:stop] = values
        return result

    @abstractmethod
    def _pieces(self, payload: Payload) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Start and stop (exclusive) of each piece, and its elements as float32."""


def view_as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes read as another element type; copied first where they are not aligned.

    Args:
        data: Contiguous uint8 elements.
        dtype: The element type; its size divides the number of bytes.
    """
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat contiguous tensor, without a copy."""
    return tensor.view(torch.uint8)


def is_finite(flat: torch.Tensor) -> bool:
    """Whether a tensor has neither an infinite nor a NaN element.

    Args:
        flat: At least one element.
    """
    # One pass without a temporary: NaN comes through as both extremes.
    extremes: Any = torch.aminmax(flat)
    return math.isfinite(float(extremes.min)) and math.isfinite(float(extremes.max))
