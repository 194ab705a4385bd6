"""The elements of largest magnitude, found exactly."""

from __future__ import annotations

import torch

_SAMPLE = 4096
_WORTHWHILE = 1 << 15
_DENSE = 0.1


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Finds the elements of largest magnitude; NaN counts as the largest.

    A sample estimates the magnitude above which slightly more than `count` elements lie; only these
    are compared. If there are fewer, all elements are compared.

    Args:
        values: Floating, flat.
        count: Number of elements to find, at most all.

    Returns:
        Their indices: int64, in no order; every one of them is at least as large as every
        other element.
    """
    total = values.numel()
    if count >= total:
        return torch.arange(total, device=values.device)
    magnitudes = values.abs()
    if values.device.type == "cpu" and total >= _WORTHWHILE and count <= _DENSE * total:
        candidates = (magnitudes >= _limit(magnitudes, count)).nonzero().view(-1)
        # Comparisons with NaN are false, so the count may be too small.
        if count <= candidates.numel() and not bool(magnitudes.sum().isnan()):
            chosen = torch.topk(magnitudes[candidates], count, sorted=False).indices
            return candidates[chosen]
    return torch.topk(magnitudes, count, sorted=False).indices


def _limit(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    total = magnitudes.numel()
    # Evenly spaced elements would meet the same column of every row: an odd stride does not.
    stride = (total // _SAMPLE) | 1
    sample = magnitudes[::stride]
    expected = sample.numel() * count / total
    # Three standard deviations more than expected, so that hardly ever too few are found.
    rank = min(sample.numel(), int(expected + 3 * expected**0.5) + 2)
    return torch.topk(sample, rank, sorted=False).values.min()
