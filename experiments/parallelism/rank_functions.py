"""Communication inside a model, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sent, ctx.received = sent, received
        return _all_to_all(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_to_all(gradient, ctx.received, ctx.sent), None, None


def copy_to_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, used by each rank in its own way; gradients are summed over ranks."""
    result: torch.Tensor = _Copied.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, used by all in the same way."""
    result: torch.Tensor = _Summed.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Sends each rank some rows and receives some of each.

    Args:
        rows: The rows for rank 0, then the rows for rank 1, and so on.
        sent: Number of rows to send to each rank.
        received: Number of rows to receive from each rank.
    """
    result: torch.Tensor = _Exchanged.apply(rows, sent, received)  # type: ignore[no-untyped-call]
    return result


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result
