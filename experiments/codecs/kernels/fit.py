"""The factor by which rounded numbers have to be multiplied to be nearest to the exact ones."""

from __future__ import annotations

import torch


def fit_sums(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums <x, r> and <r, r> over the last dimension.

    Args:
        exact: float32, of a size at which squares neither vanish nor overflow. Overwritten.
        rounded: The rounded values, same shape.
    """
    shape = exact.shape[:-1]
    if shape.numel() == 1:  # faster for one long row
        one, other = exact.view(-1), rounded.view(-1)
        return torch.dot(one, other).view(shape), torch.dot(other, other).view(shape)
    product = exact.mul_(rounded).sum(-1)
    norm: torch.Tensor = torch.linalg.vector_norm(rounded, dim=-1)
    return product, norm.square_()


def fitted_factor(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The least-squares factor <x, r> / <r, r> over the last dimension.

    Args:
        exact: As for `fit_sums`. Overwritten.
        rounded: The rounded values, same shape.

    Returns:
        One factor for each row; 0 for a row of zeros.
    """
    product, square = fit_sums(exact, rounded)
    return torch.where(square == 0, 0.0, product / square)
