"""Communication inside a model, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Send = Callable[[torch.Tensor], torch.Tensor]
"""Sends rows to other ranks and returns those that come from them."""


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
    def forward(ctx: Any, rows: torch.Tensor, send: Send, send_back: Send) -> torch.Tensor:
        ctx.send_back = send_back
        return send(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.send_back(gradient), None, None


def copy_to_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, used by each rank in its own way; gradients are summed over ranks."""
    result: torch.Tensor = _Copied.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, used by all in the same way."""
    result: torch.Tensor = _Summed.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def exchange_rows(rows: torch.Tensor, send: Send, send_back: Send) -> torch.Tensor:
    """Sends each rank some rows and receives some of each; their gradients travel back.

    Args:
        rows: The rows for rank 0, then the rows for rank 1, and so on.
        send: Sends them and returns those for this rank, in the same order.
        send_back: Sends rows like the result to where they came from.
    """
    result: torch.Tensor = _Exchanged.apply(rows, send, send_back)  # type: ignore[no-untyped-call]
    return result
