"""Codecs that encode, decode and add up many tensors of equal length at the cost of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence

import torch

from ddltrace.experiments.codecs.kernels.chunks import rows_at_once
from ddltrace.experiments.codecs.kernels.codec import Codec, Payload, check_encodable, sum_type


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
