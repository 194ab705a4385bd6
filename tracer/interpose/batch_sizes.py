"""How many samples and tokens a batch of a data loader has."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import torch

_MOST_PARTS: Final = 64
_TOKEN_NAMES: Final = ("input_ids", "tokens")
_TOKEN_TYPES: Final = (torch.int64, torch.int32)
"""Element types that embeddings take."""


def size_of_batch(batch: Any) -> tuple[int, int]:
    """Finds the numbers of samples and of tokens.

    Looks at the first 64 parts of nested dictionaries, lists and tuples. No code of the job runs.

    Args:
        batch: What the data loader returned.

    Returns:
        The first dimension of the first tensor that has one, and the number of elements of the
        two-dimensional tensor of 32-bit or 64-bit integers that is called ``input_ids`` or
        ``tokens``, or else of the first one; -1 where there is none.
    """
    samples = tokens = named = -1
    parts: list[tuple[Any, Any]] = [(None, batch)]
    # A tensor of a subclass may override what its attributes do.
    with torch._C.DisableTorchFunctionSubclass():
        for _ in range(_MOST_PARTS):
            if not parts:
                break
            name, part = parts.pop()
            if not isinstance(part, torch.Tensor):
                parts += reversed([*islice(_parts_of(part), _MOST_PARTS)])
            elif part.dim() > 0 and not part.is_nested:
                samples = part.shape[0] if samples < 0 else samples
                if part.dim() == 2 and part.dtype in _TOKEN_TYPES:
                    tokens = part.numel() if tokens < 0 else tokens
                    if named < 0 and name in _TOKEN_NAMES:
                        named = part.numel()
    return samples, tokens if named < 0 else named


def _parts_of(part: Any) -> Iterable[tuple[Any, Any]]:
    """Name and value of each; the names of the items of a list are None."""
    if isinstance(part, UserDict):  # as tokenizers of Hugging Face return
        part = part.data
    if isinstance(part, dict):
        return dict.items(part)
    if isinstance(part, list):
        return ((None, item) for item in list.__iter__(part))
    if isinstance(part, tuple):
        return ((None, item) for item in tuple.__iter__(part))
    return ()
