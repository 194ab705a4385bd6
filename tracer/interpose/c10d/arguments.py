"""Tensors and sizes in the arguments of a collective: tensors, lists of tensors, lists of lists."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def flatten(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a tensor, a list of tensors or a list of lists."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if value and isinstance(value[0], (list, tuple)):
        return [tensor for inner in value for tensor in inner]
    return list(value)


def first_tensor(arguments: Iterable[Any]) -> Any:
    """Returns the first tensor in the arguments; None if they contain none."""
    for argument in arguments:
        inner = argument
        while isinstance(inner, (list, tuple)):
            inner = inner[0] if inner else None
        if inner is not None:
            return inner
    return None


def measure(value: Any) -> tuple[list[torch.Tensor], int, bool]:
    """Returns the tensors of an argument and their size.

    Args:
        value: A tensor, a list of tensors or a list of lists.

    Returns:
        The tensors; the bytes of their elements (for sparse tensors, of indices and values);
        whether one of them is sparse.
    """
    tensors = flatten(value)
    total, sparse = 0, False
    for tensor in tensors:
        if tensor.is_sparse:
            sparse = True
            total += tensor._indices().nbytes + tensor._values().nbytes
        else:
            total += tensor.nbytes
    return tensors, total, sparse


def bytes_by_member(inputs: Any, splits: Sequence[int]) -> list[int] | None:
    """Returns what an all-to-all sends to each member of its group, in the order of its ranks.

    Args:
        inputs: Its input: a tensor for each member, or one tensor.
        splits: Of one tensor, the rows for each member; empty if it is divided evenly.

    Returns:
        The bytes for each member; None if the call gives no sizes.
    """
    if isinstance(inputs, (list, tuple)):
        return [tensor.nbytes for tensor in inputs]
    if not splits:
        return None
    row_bytes = inputs.nbytes // max(1, sum(splits))
    return [row_bytes * rows for rows in splits]


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Returns the name of an element type, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
