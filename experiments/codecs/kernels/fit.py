"""The factor by which rounded numbers have to be multiplied to be nearest to the exact ones."""

from __future__ import annotations

import torch


def fitted_factor(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """The least-squares factor <x, r> / <r, r> of each row.

    Args:
        exact: Rows x elements, float32, of a size at which squares neither vanish nor
            overflow. Overwritten.
        rounded: The rounded values, same shape.

    Returns:
        One factor for each row; 0 for a row of zeros.
    """
    product = exact.mul_(rounded).sum(1)
    square = torch.linalg.vector_norm(rounded, dim=1).square_()
    return torch.where(square == 0, 0.0, product / square)
